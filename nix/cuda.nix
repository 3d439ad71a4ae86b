# What needs NVIDIA's unfree compilers: machine code of the kernels, the program with it inside, and a shell.
{
  nixpkgs,
  system,
  rust,
  src,
}:
let
  # The one place that names the CUDA version. Machine code of any 12.x runs on drivers from r525 on; 12.9's PTX, for GPUs newer than those
  # it was made for, asks for r575.
  cudaVersion = "12_9";

  # Of all that is unfree, what is under CUDA's licence, and nothing else.
  pkgs = import nixpkgs {
    inherit system;
    config.allowUnfreePredicate =
      package:
      builtins.all (licence: licence.free || licence.shortName == "CUDA EULA") (list package.meta.license);
  };
  list = x: if builtins.isList x then x else [ x ];
  cudaPackages = pkgs."cudaPackages_${cudaVersion}";

  # The script that builds them everywhere, and at least one source beside it.
  sources = builtins.filter (name: builtins.match ".*\\.cu" name != null) (
    builtins.attrNames (builtins.readDir (src + "/kernels"))
  );
  hasKernels = sources != [ ] && builtins.pathExists (src + "/kernels/build.py");
  manifest = builtins.fromTOML (builtins.readFile (src + "/crates/chiku/Cargo.toml"));

  # What the script finds in its --cache, in the place of what it would fetch from a registry.
  compiler = pkgs.runCommand "chiku-cuda-compiler-${cudaVersion}" { } ''
    mkdir $out
    cp --dereference ${pkgs.lib.getLib cudaPackages.cuda_nvrtc}/lib/libnvrtc*.so* $out/
    cp --dereference ${cudaPackages.cuda_cuobjdump}/bin/cuobjdump ${cudaPackages.cuda_nvdisasm}/bin/nvdisasm $out/
  '';

  # `NAME.sm_86.cubin` and so on for every source, and PTX for devices that none of them fits.
  kernels = pkgs.stdenv.mkDerivation {
    pname = "chiku-kernels";
    version = cudaVersion;
    src = src + "/kernels";
    nativeBuildInputs = [ pkgs.python3 ];
    buildPhase = "python3 build.py --cache ${compiler} --out images";
    installPhase = ''
      mkdir -p $out
      cp images/* $out/
    '';
  };

  program = rust.build {
    pname = "chiku-cuda";
    cargoExtraArgs = "--locked --package chiku --features cuda";
    CHIKU_CUBINS = kernels;
  };
in
{
  packages =
    (if hasKernels then { inherit kernels; } else { })
    // (
      if hasKernels && manifest ? features.cuda then
        {
          cuda = pkgs.writeShellScriptBin "chiku" ''
            . ${./driver.sh}
            chiku_need_driver
            exec ${program}/bin/chiku "$@"
          '';
        }
      else
        { }
    );

  # The other shell, and what makes machine code of the kernels: python3 kernels/build.py --cache "$CHIKU_CUDA" --out target/cubins
  shell =
    base:
    pkgs.mkShell {
      inputsFrom = [ base ];
      packages = [ pkgs.python3 ];
      CHIKU_CUDA = compiler;
    };
}
