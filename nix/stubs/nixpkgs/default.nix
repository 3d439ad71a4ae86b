# An allow-list: an attribute that is not here does not evaluate. That nixpkgs has it under this name is for a reviewer to see.
{
  system,
  overlays ? [ ],
  config ? { },
}:
let
  named = name: derivation {
    inherit name system;
    builder = "stub";
  };
  # A function that nixpkgs offers. Its arguments are evaluated as far as a real derivation would.
  building = name: arguments: derivation (
    removeAttrs arguments [ "meta" "packages" "inputsFrom" ]
    // {
      inherit system;
      name = arguments.pname or arguments.name or name;
      builder = "stub";
      inputs = (arguments.packages or [ ]) ++ (arguments.inputsFrom or [ ]);
    }
  );
  script = name: text: derivation {
    inherit name system text;
    builder = "stub";
  };
  # Refused unless the configuration allows its licence, as the real ones are.
  unfree =
    name:
    let
      meta.license = {
        free = false;
        shortName = "CUDA EULA";
      };
    in
    if (config.allowUnfreePredicate or (_: false)) { inherit meta; } then named name else throw "${name} is unfree and not allowed";
  plain = [
    "actionlint"
    "autoAddDriverRunpath"
    "cargo-deny"
    "cargo-machete"
    "just"
    "nixfmt-tree"
    "python3"
    "shellcheck"
  ];
  names = list: make: builtins.listToAttrs (map (name: { inherit name; value = make name; }) list);
  base = names plain named // {
    lib.getLib = package: package;
    mkShell = building "shell";
    stdenv.mkDerivation = building "package";
    runCommand = name: arguments: text: building name (arguments // { inherit name text; });
    writeShellScript = script;
    writeShellScriptBin = script;
    cudaPackages_12_9 = names [ "cuda_cuobjdump" "cuda_nvdisasm" "cuda_nvrtc" ] unfree;
  };
in
builtins.foldl' (pkgs: overlay: pkgs // overlay pkgs pkgs) base overlays
