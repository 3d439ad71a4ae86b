//! Compiles the CUDA sources for the emulator, where the feature asks for it: each .cu twice, once plain and once instrumented, and the
//! emulator itself, which is never instrumented.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "emulator")]
    emulator::build();
}

#[cfg(feature = "emulator")]
mod emulator {
    use std::{
        env, fs,
        path::{Path, PathBuf},
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

        let mut families: Vec<PathBuf> =
            [sources.to_path_buf(), emulator.join("tests")].iter().flat_map(|folder| cuda_sources(folder)).collect();
        families.sort();

        let mut runtime = compiler(&emulator);
        runtime.files(RUNTIME.iter().map(|name| emulator.join(name).with_extension("cpp")));
        runtime.file(table(&families));
        // The linker takes from a library what those before it ask for: kernels call the runtime, the runtime lists the kernels.
        let mut kernels = compiler(&emulator);
        kernels.flag("-include").flag("language.hpp");
        let mut objects = Vec::new();
        for source in &families {
            for mode in ["plain", "checked"] {
                let mut one = kernels.clone();
                one.define("EMULATOR_FAMILY", symbol(source, mode).as_str()).flag("-x").flag("c++").file(source);
                if mode == "checked" {
                    CHECKED.iter().for_each(|flag| {
                        one.flag(flag);
                    });
                }
                objects.extend(one.out_dir(folder(mode)).compile_intermediates());
            }
        }
        runtime.objects(objects).compile("emulator");
    }

    fn compiler(emulator: &Path) -> cc::Build {
        let mut build = cc::Build::new();
        build.cpp(true).std("c++17").opt_level(2).debug(true).include(emulator).warnings(true).extra_warnings(true);
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

    /// The list of all families in both modes, as C++.
    fn table(families: &[PathBuf]) -> PathBuf {
        let mut text = String::from("#include <vector>\n#include \"language.hpp\"\nextern \"C\" {\n");
        let list = |mode: &str| families.iter().map(|f| symbol(f, mode)).collect::<Vec<_>>();
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
