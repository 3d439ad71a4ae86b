# What needs NVIDIA's unfree compilers: machine code of the kernels, the program with it inside, and a shell.
{
  nixpkgs,
  system,
  rust,
  src,
}:
let
  # The one place that names the CUDA version. 12.x machine code runs on drivers from r525 on.
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

  entries = builtins.readDir (src + "/kernels");
  sources = builtins.filter (name: builtins.match ".*\\.cu" name != null) (builtins.attrNames entries);
  manifest = builtins.fromTOML (builtins.readFile (src + "/crates/chiku/Cargo.toml"));

  # `NAME.sm_86.cubin` and so on for every source, and PTX for devices that none of them fits.
  kernels = pkgs.stdenv.mkDerivation {
    pname = "chiku-kernels";
    version = cudaVersion;
    src = src + "/kernels";
    nativeBuildInputs = [ cudaPackages.cuda_nvcc ];
    buildInputs = [ cudaPackages.cuda_cudart ];
    buildPhase = ''
      for source in ${builtins.concatStringsSep " " sources}; do
        name=''${source%.cu}
        for arch in 80 86 90; do
          nvcc -arch=sm_$arch -std=c++17 -O3 -fmad=false -cubin -o $name.sm_$arch.cubin $source
        done
        nvcc -arch=compute_80 -std=c++17 -O3 -fmad=false -ptx -o $name.compute_80.ptx $source
      done
    '';
    installPhase = ''
      mkdir -p $out
      cp *.cubin *.ptx $out/
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
    (if sources == [ ] then { } else { inherit kernels; })
    // (
      if manifest ? features.cuda then
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
