{
  description = "Decodes Gemma 4 at batch 1, greedily, and proves that it did not break the model";

  inputs = {
    nixpkgs.url = "github:NixOS/nixpkgs/nixos-unstable";
    crane.url = "github:ipetkov/crane";
    rust-overlay = {
      url = "github:oxalica/rust-overlay";
      inputs.nixpkgs.follows = "nixpkgs";
    };
  };

  outputs =
    {
      self,
      nixpkgs,
      crane,
      rust-overlay,
    }:
    let
      system = "x86_64-linux";
      # What records name as the program's commit: a build in the Nix store has no .git to ask.
      commit = self.rev or self.dirtyRev or "dirty";

      # Nothing unfree in here: the default package opens the driver when it runs and needs no CUDA to be built.
      pkgs = import nixpkgs {
        inherit system;
        overlays = [ rust-overlay.overlays.default ];
      };
      # The toolchain is the one that rustup takes, from the same file.
      toolchain = pkgs.rust-bin.fromRustupToolchainFile ./rust-toolchain.toml;
      craneLib = (crane.mkLib pkgs).overrideToolchain (_: toolchain);

      rust = import ./nix/rust.nix { inherit pkgs craneLib commit; src = self; };
      # `kernels` where the tree has CUDA sources, `cuda` where the program has the feature that embeds them.
      cuda = import ./nix/cuda.nix { inherit nixpkgs system rust; src = self; };

      # One app for each command of the program. `gpu` marks those that compute: with a CUDA build they run that one, which looks
      # for the driver first and ends with exit code 3, and what to do, where there is none.
      commands = {
        bake = { };
        bench.gpu = true;
        demo = { };
        doctor = { };
        generate.gpu = true;
        gpu-check.gpu = true;
        logits.gpu = true;
        ppl.gpu = true;
        sensitivity.gpu = true;
        verify.gpu = true;
      };
      app = name: { gpu ? false }: {
        type = "app";
        program = toString (
          pkgs.writeShellScript "chiku-${name}" ''
            exec ${if gpu && cuda.packages ? cuda then cuda.packages.cuda else rust.chiku}/bin/chiku ${name} "$@"
          ''
        );
      };
    in
    {
      packages.${system} = {
        default = rust.chiku;
      }
      // cuda.packages;

      apps.${system} = builtins.mapAttrs app commands;

      checks.${system} = rust.checks;

      devShells.${system} = {
        default = pkgs.mkShell {
          packages = [
            toolchain
            pkgs.actionlint
            pkgs.cargo-deny
            pkgs.cargo-machete
            pkgs.just
            pkgs.shellcheck
          ];
        };
        cuda = cuda.shell toolchain;
      };

      formatter.${system} = pkgs.nixfmt-tree;
    };
}
