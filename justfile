# Each recipe is one call of the program or of cargo; everything also works without just.

# The whole story on the embedded model, in a minute.
demo:
    cargo run --release -- demo

# All tests.
test:
    cargo test --workspace

# The gate on the embedded model: perplexity under a cap, every computational path identical.
verify:
    cargo run --release -- verify --model nano --cap 34 --drafter nano --tree 1,1,1,1

# The whole identity matrix: every target, 64 prompts of 256 tokens, chains of 1 to 15 and stars. Minutes.
identity:
    cargo test --release -p runtime --test identity -- --ignored --nocapture

# Tokens per second of the embedded model by the field's protocol, shortened; the record goes to results/.
bench:
    cargo run --release -- bench run --model nano --limit 32 --max-tokens 128

# All measured runs on one page, target/report.html.
report:
    cargo run --release -- bench report --acceptance results/2026/bench/nano-acceptance-mtp-12.json --acceptance results/2026/bench/nano-acceptance-ngram-12.json -o target/report.html

# What a pass costs at E4B's width, what a verify pass costs, and one matrix product by itself.
microbench:
    cargo bench -p runtime -p kernels -p bake

# Is the working tree slower than BASE? Builds both and runs them in turn.
track base="HEAD~1":
    ci/track --base {{ base }} --fail-on slower

# Format, lints, documentation.
lint:
    cargo fmt --all --check && cargo clippy --workspace --all-targets -- -D warnings && RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# The kernels' machine code, by a compiler from a registry, into target/cubins.
cubins:
    python3 kernels/build.py --out target/cubins

# Test the GPU of this machine: its results, its memory, its launches, every kernel.
gpu-check: cubins
    CHIKU_CUBINS=target/cubins cargo run --release --features cuda -- gpu-check

# One folder under target/ that a GPU host runs without a toolchain: program with machine code inside, script, model.
gpu-bundle:
    ci/gpu-bundle

# Train the embedded model and its drafter again, from the corpus packages of models/nano/train/README.md. Three quarters of an hour.
nano corpus work out:
    cd models/nano && for step in "prepare --corpus {{ absolute_path(corpus) }}" train "export --out {{ absolute_path(out) }}" "draft --out {{ absolute_path(out) }}"; do python3 -m train $step --work {{ absolute_path(work) }} || exit 1; done

# The program as it is given away: one file that needs nothing installed, under target/.
release:
    cargo build --release --locked && tar -C target/release -czf target/chiku-x86_64-linux.tar.gz chiku

# All that main must pass.
ci:
    bash .ci/run

# Ten million damaged headers and configurations, with libFuzzer: needs a nightly compiler and cargo-fuzz.
fuzz:
    cargo +nightly fuzz run header -- -runs=10000000
    cargo +nightly fuzz run config -- -runs=10000000

# The same as a test, on any compiler.
fuzz-stable:
    CHIKU_FUZZ_EXECUTIONS=10000000 cargo test --release -p runtime --test fuzz_corpus
