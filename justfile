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

# What a pass costs at E4B's width, what a verify pass costs, and one matrix product by itself.
bench:
    cargo bench -p runtime
    cargo bench -p kernels

# Format, lints, documentation.
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
