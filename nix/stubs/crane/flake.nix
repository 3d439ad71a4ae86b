{
  description = "crane's functions as this project uses them: for evaluation without a network";
  outputs = _: {
    mkLib =
      pkgs:
      let
        # Each takes what its documentation names; another argument is an environment variable of the build there, and here.
        building = kind: required: arguments:
          let
            missing = builtins.filter (name: !(arguments ? ${name})) required;
          in
          if missing != [ ] then
            throw "${kind}: needs ${builtins.concatStringsSep ", " missing}"
          else
            derivation (
              removeAttrs arguments [ "meta" ]
              // {
                name = "${arguments.pname}-${arguments.version}-${kind}";
                system = "x86_64-linux";
                builder = "stub";
              }
            );
        with_toolchain = toolchain: {
          buildDepsOnly = arguments: building "deps" [ "src" ] (arguments // { inherit toolchain; });
          buildPackage = building "package" [ "src" "cargoArtifacts" ];
          cargoClippy = building "clippy" [ "src" "cargoArtifacts" "cargoClippyExtraArgs" ];
          cargoDeny = building "deny" [ "src" ];
          cargoFmt = building "fmt" [ "src" ];
          cargoTest = building "test" [ "src" "cargoArtifacts" "cargoTestExtraArgs" ];
        };
      in
      {
        overrideToolchain = choose: with_toolchain (choose pkgs);
      };
  };
}
