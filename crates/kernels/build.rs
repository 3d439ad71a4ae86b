//! What the features ask for. `emulator`: the CUDA sources compiled for the CPU, each .cu twice, once plain and once instrumented, and the
//! emulator itself, which is never instrumented. `cuda`: the machine code that `kernels/build.py` made of the same sources, compressed; it is
//! taken wherever `CHIKU_CUBINS` names it, and the feature makes its absence an error.

#[cfg(feature = "emulator")]
mod mutants;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "emulator")]
    emulator::build();
    if let Err(reason) = cuda::embed() {
        eprintln!("error: {reason}");
        std::process::exit(1);
    }
}

mod cuda {
    use std::{
        env, fs,
        path::{Path, PathBuf},
    };

    /// Endings of one family's images, and `kernels::device::Target` of each.
    const TARGETS: [(&str, &str); 4] = [
        ("compute_80.ptx", "Target::Ptx(80)"),
        ("sm_80.cubin", "Target::Sm(80)"),
        ("sm_86.cubin", "Target::Sm(86)"),
        ("sm_90.cubin", "Target::Sm(90)"),
    ];
    const HOW: &str = "make it with\n    python3 kernels/build.py --out target/cubins\nand build again with CHIKU_CUBINS=target/cubins";

    pub fn embed() -> Result<(), String> {
        println!("cargo:rerun-if-env-changed=CHIKU_CUBINS");
        let root = Path::new("../..");
        let sources = root.join("kernels");
        println!("cargo:rerun-if-changed={}", sources.display());
        let out =
            PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: build with cargo")?).join("images.rs");
        let write = |path: &Path, text: &[u8]| fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()));
        let Some(given) = env::var_os("CHIKU_CUBINS").filter(|v| !v.is_empty()) else {
            if cfg!(feature = "cuda") {
                return Err(format!("the feature `cuda` puts the kernels' machine code into the program: {HOW}"));
            }
            return write(&out, b"static IMAGES: &[Image] = &[];\n");
        };
        // Relative to the workspace, where cargo is called, not to this package.
        let folder = root.join(&given);
        println!("cargo:rerun-if-changed={}", folder.display());
        let given = PathBuf::from(given);
        let read = |path: PathBuf| {
            fs::read(&path).map_err(|e| format!("CHIKU_CUBINS={}: {}: {e}; {HOW}", given.display(), path.display()))
        };
        let made_of = String::from_utf8_lossy(&read(folder.join("sources"))?).trim().to_string();
        if made_of != fingerprint(&sources)? {
            return Err(format!("CHIKU_CUBINS={}: its machine code is of other sources; {HOW}", given.display()));
        }
        let mut text = String::from("static IMAGES: &[Image] = &[\n");
        for family in listed(&sources, &["cu"])? {
            let family = family.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            for (ending, target) in TARGETS {
                let name = format!("{family}.{ending}");
                let compressed = lz4_flex::compress_prepend_size(&read(folder.join(&name))?);
                let path = out.with_file_name(name + ".lz4");
                write(&path, &compressed)?;
                text += &format!(
                    "    Image {{ family: {family:?}, target: {target}, compressed: include_bytes!({path:?}) }},\n"
                );
            }
        }
        write(&out, (text + "];\n").as_bytes())
    }

    /// Files of a folder with one of these endings, by name.
    fn listed(folder: &Path, endings: &[&str]) -> Result<Vec<PathBuf>, String> {
        let entries = fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let mut found: Vec<PathBuf> =
            paths.filter(|p| p.extension().is_some_and(|e| endings.iter().any(|wanted| e == *wanted))).collect();
        found.sort();
        Ok(found)
    }

    /// What the machine code was made of: 64-bit FNV-1a over the names and contents of all sources, as `kernels/build.py` writes it.
    fn fingerprint(sources: &Path) -> Result<String, String> {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for path in listed(sources, &["cu", "cuh"])? {
            let contents = fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            for byte in name.bytes().chain([0]).chain(contents).chain([0]) {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
            }
        }
        Ok(format!("{hash:016x}"))
    }
}

#[cfg(feature = "emulator")]
mod emulator {
    use std::{
        collections::BTreeMap,
        env, fs,
        hash::{DefaultHasher, Hash, Hasher},
        path::{Path, PathBuf},
        sync::{
            Mutex,
            atomic::{AtomicUsize, Ordering},
        },
        thread,
    };

    /// The sources of the emulator, in `kernels/emulator`.
    const RUNTIME: [&str; 7] = ["abi", "check", "launch", "memory", "report", "shadow", "warp"];

    /// What the compiler inserts into checked kernels. Vectorised accesses would be reported at addresses that no kernel names.
    const CHECKED: [&str; 4] = [
        "-fsanitize=thread,alignment,bounds,shift",
        "-fno-tree-vectorize",
        "-fno-tree-slp-vectorize",
        "-DEMULATOR_CHECKED",
    ];

    pub fn build() {
        if env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("x86_64") {
            println!("cargo:warning=the emulator is for x86-64; the feature does nothing on this machine");
            return;
        }
        let sources = Path::new("../../kernels");
        let emulator = sources.join("emulator");
        println!("cargo:rerun-if-changed={}", sources.display());
        // Clippy checks and links nothing: whatever the C++ would take minutes for is not used.
        if env::var("RUSTC_WORKSPACE_WRAPPER").is_ok_and(|wrapper| wrapper.contains("clippy")) {
            return;
        }

        let mut families: Vec<PathBuf> =
            [sources.to_path_buf(), emulator.join("tests")].iter().flat_map(|folder| cuda_sources(folder)).collect();
        families.sort();
        let mutants = mutants(sources);

        let mut runtime = compiler(&emulator);
        runtime.files(RUNTIME.iter().map(|name| emulator.join(name).with_extension("cpp")));
        runtime.file(table(&families, &mutants));
        // The linker takes from a library what those before it ask for: kernels call the runtime, the runtime lists the kernels.
        let mut kernels = compiler(&emulator);
        kernels.include(sources).flag("-include").flag("language.hpp");
        let compile = |source: &PathBuf| -> Vec<PathBuf> {
            let mode = |mode: &str| {
                let mut one = kernels.clone();
                one.define("EMULATOR_FAMILY", symbol(source, mode).as_str()).flag("-x").flag("c++").file(source);
                if mode == "checked" {
                    CHECKED.iter().for_each(|flag| {
                        one.flag(flag);
                    });
                }
                unless_compiled(source, mode, || one.out_dir(folder(mode)).compile_intermediates())
            };
            let modes: &[&str] = if mutants.contains(source) { &["checked"] } else { &["plain", "checked"] };
            modes.iter().flat_map(|m| mode(m)).collect()
        };
        runtime.objects(on_all_cores(&[&families[..], &mutants].concat(), compile)).compile("emulator");
    }

    /// The products' sources with one mistake each, as families of one kernel.
    fn mutants(sources: &Path) -> Vec<PathBuf> {
        println!("cargo:rerun-if-changed=mutants.rs");
        let read = |name: &str| {
            let path = sources.join(name);
            fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
        };
        let texts = ["gemm.cuh", "formats.cuh"].map(|name| (name, read(name)));
        let write = |path: PathBuf, text: String| {
            // Left alone where it is there already, so that its object is not made again.
            if fs::read_to_string(&path).is_ok_and(|found| found == text) {
                return path;
            }
            fs::write(&path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            path
        };
        let plant = |&(name, from, to): &(&str, &str, &str)| {
            let folder = folder(name);
            let times: usize =
                texts.iter().map(|(_, text)| if from.is_empty() { 1 } else { text.matches(from).count() }).sum();
            assert!(
                from.is_empty() || times == 1,
                "mutants.rs: `{from}` stands {times} times in the sources, not once"
            );
            for (file, text) in &texts {
                let text = if from.is_empty() { text.clone() } else { text.replace(from, to) };
                write(folder.join(file), text);
            }
            let text = format!("#include \"gemm.cuh\"\nGEMM({name}, Int3, 16, 64)\nKERNELS(EXPORT({name}))\n");
            write(folder.join(name).with_extension("cu"), text)
        };
        crate::mutants::MUTANTS.iter().map(plant).collect()
    }

    /// Objects of an earlier build, where they were made of the same text: a change to one family does not compile the others again.
    fn unless_compiled(source: &Path, mode: &str, compile: impl FnOnce() -> Vec<PathBuf>) -> Vec<PathBuf> {
        let mut texts = BTreeMap::new();
        collect(source, &mut texts);
        let mut hasher = DefaultHasher::new();
        (texts, include_str!("build.rs"), env::var_os("OPT_LEVEL"), env::var_os("CXX")).hash(&mut hasher);
        let made_of = format!("{:x}", hasher.finish());
        let record = folder(mode).join(symbol(source, mode)).with_extension("made-of");
        if let Ok(found) = fs::read_to_string(&record) {
            let mut lines = found.lines();
            let objects: Vec<PathBuf> = lines.clone().skip(1).map(PathBuf::from).collect();
            if lines.next() == Some(&made_of) && objects.iter().all(|object| object.is_file()) {
                return objects;
            }
        }
        let objects = compile();
        let paths: String = objects.iter().map(|object| format!("{}\n", object.display())).collect();
        fs::write(&record, format!("{made_of}\n{paths}")).expect("write what objects are made of");
        objects
    }

    /// The text of a source and of everything that it includes by a name in quotes.
    fn collect(path: &Path, texts: &mut BTreeMap<PathBuf, String>) {
        let Ok(text) = fs::read_to_string(path) else { return };
        if texts.insert(path.to_path_buf(), text.clone()).is_some() {
            return;
        }
        let kernels = Path::new("../../kernels");
        let included = text.lines().filter_map(|line| line.trim().strip_prefix("#include \"")?.split('"').next());
        for name in included.chain(["language.hpp"]) {
            let folders = [path.parent().unwrap_or(kernels), kernels, &kernels.join("emulator")];
            folders.iter().for_each(|folder| collect(&folder.join(name), texts));
        }
    }

    /// What `work` makes of every item, computed by as many threads as cargo gives to a build script.
    fn on_all_cores<T: Sync>(items: &[T], work: impl Fn(&T) -> Vec<PathBuf> + Sync) -> Vec<PathBuf> {
        let threads = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
        let next = AtomicUsize::new(0);
        let results: Mutex<Vec<Vec<PathBuf>>> = Mutex::new(vec![Vec::new(); items.len()]);
        thread::scope(|scope| {
            for _ in 0..items.len().min(threads) {
                scope.spawn(|| {
                    while let Some((i, item)) =
                        Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, items.get(i)?)))
                    {
                        let made = work(item);
                        results.lock().expect("no thread panicked")[i] = made;
                    }
                });
            }
        });
        results.into_inner().expect("no thread panicked").concat()
    }

    fn compiler(emulator: &Path) -> cc::Build {
        let mut build = cc::Build::new();
        build
            .cpp(true)
            .std("c++17")
            .opt_level(2)
            .debug(false)
            .flag("-g1")
            .include(emulator)
            .warnings(true)
            .extra_warnings(true);
        // Rounding is the kernels' own: no product and sum becomes one operation unless the source says so.
        for flag in
            ["-mavx2", "-mfma", "-mf16c", "-ffp-contract=off", "-fno-strict-aliasing", "-ftls-model=initial-exec"]
        {
            build.flag(flag);
        }
        build.flag("-Wno-unknown-pragmas");
        build
    }

    fn cuda_sources(folder: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let paths = entries.map(|entry| entry.expect("a folder's entry").path());
        paths.filter(|path| path.extension().is_some_and(|e| e == "cu")).collect()
    }

    fn symbol(source: &Path, mode: &str) -> String {
        format!("emulator_family_{}_{mode}", source.file_stem().expect("a file").to_string_lossy())
    }

    fn folder(name: &str) -> PathBuf {
        let folder = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo")).join(name);
        fs::create_dir_all(&folder).expect("a folder for objects");
        folder
    }

    /// The list of all families in both modes, and of mutants in the checked one, as C++.
    fn table(families: &[PathBuf], mutants: &[PathBuf]) -> PathBuf {
        let mut text = String::from("#include <vector>\n#include \"language.hpp\"\nextern \"C\" {\n");
        let list = |mode: &str| {
            let more = if mode == "checked" { mutants } else { &[] };
            families.iter().chain(more).map(|f| symbol(f, mode)).collect::<Vec<_>>()
        };
        for name in [list("plain"), list("checked")].concat() {
            text += &format!("extern const emulator::Family {name};\n");
        }
        text += "}\nnamespace emulator {\nstd::vector<Family> families(bool checked) {\n";
        text += &format!("    if (checked) return {{{}}};\n", list("checked").join(", "));
        text += &format!("    return {{{}}};\n}}\n}}\n", list("plain").join(", "));
        let path = folder("table").join("families.cpp");
        fs::write(&path, text).expect("write the list of families");
        path
    }
}
