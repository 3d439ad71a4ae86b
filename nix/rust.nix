# The program and its checks, on the CPU and without anything unfree.
{
  pkgs,
  craneLib,
  commit,
  src,
}:
let
  workspace = (builtins.fromTOML (builtins.readFile ../Cargo.toml)).workspace;
  common = {
    inherit src;
    inherit (workspace.package) version;
    pname = "chiku";
    strictDeps = true;
  };
  # The dependencies alone, once a profile; they do not know the commit, so a commit does not build them again.
  dependencies = craneLib.buildDepsOnly common;
  dev = common // {
    CARGO_PROFILE = "dev";
  };
  devDependencies = craneLib.buildDepsOnly dev;

  build =
    extra:
    craneLib.buildPackage (
      common
      // {
        cargoArtifacts = dependencies;
        cargoExtraArgs = "--locked --package chiku";
        CHIKU_COMMIT = commit;
        # Puts NixOS's driver folder on the search path of the program, which opens the driver when it runs.
        nativeBuildInputs = [ pkgs.autoAddDriverRunpath ];
        # Tests are a check of their own, in the profile that has overflow checks.
        doCheck = false;
        meta = {
          description = "Decodes Gemma 4 at batch 1, greedily, and proves that it did not break the model";
          mainProgram = "chiku";
          platforms = [ "x86_64-linux" ];
        };
      }
      // extra
    );
  chiku = build { };
in
{
  inherit build chiku;

  checks = {
    fmt = craneLib.cargoFmt { inherit (common) src pname version; };
    clippy = craneLib.cargoClippy (
      dev
      // {
        cargoArtifacts = devDependencies;
        cargoClippyExtraArgs = "--workspace --all-targets -- -D warnings";
      }
    );
    test = craneLib.cargoTest (
      dev
      // {
        cargoArtifacts = devDependencies;
        cargoTestExtraArgs = "--workspace";
        # The embedded model is written under the user's cache, and a build has no home.
        preCheck = "export CHIKU_CACHE=$TMPDIR/cache";
      }
    );
    deny = craneLib.cargoDeny { inherit (common) src pname version; };
    demo = pkgs.runCommand "chiku-demo" { } ''
      export CHIKU_CACHE=$TMPDIR/cache
      ${chiku}/bin/chiku demo --out "$TMPDIR/demo" | tee $out
    '';
  };
}
