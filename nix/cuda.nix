# What needs NVIDIA's unfree compilers: machine code of the kernels, the program with it inside, and a shell.
{
  nixpkgs,
  system,
  rust,
  src,
}:
let
  # The one place that names the CUDA version. Machine code of any 12.x runs on drivers from r525 on.
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

  # `NAME.sm_86.cubin` and so on for every source, and PTX for devices that none of them fits. The script takes its compiler from a
  # folder that it would else fill from a registry; it must own the files there.
  kernels = pkgs.stdenv.mkDerivation {
    pname = "chiku-kernels";
    version = cudaVersion;
    src = src + "/kernels";
    nativeBuildInputs = [ pkgs.python3 ];
    buildPhase = ''
      mkdir compiler
      cp --dereference ${pkgs.lib.getLib cudaPackages.cuda_nvrtc}/lib/libnvrtc*.so* compiler/
      cp --dereference ${cudaPackages.cuda_cuobjdump}/bin/cuobjdump ${cudaPackages.cuda_nvdisasm}/bin/nvdisasm compiler/
      python3 build.py --cache compiler --out images
    '';
    installPhase = ''
      mkdir -p $out
      cp images/* $out/
    '';
  };

  program = rust.build {
    pname = "chiku-cuda";
    cargoExtraArgs = "--locked --package chiku --features cuda";
    CHIKU_CUBINS = kernels;
    # Puts NixOS's driver folder on the search path of the program.
    nativeBuildInputs = [ pkgs.autoAddDriverRunpath ];
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
            exec ${program}/bin/chiku "$@"
          '';
        }
      else
        { }
    );

  shell =
    toolchain:
    pkgs.mkShell {
      packages = [
        toolchain
        cudaPackages.cuda_cudart
        cudaPackages.cuda_cuobjdump
        cudaPackages.cuda_nvcc
        cudaPackages.cuda_nvdisasm
      ];
    };
}
