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

      # One app for each command of the program. `gpu`: it computes on a GPU, so it is the program with machine code inside, looks for
      # the driver first, and ends with exit code 3, and what to do, where there is none. The others take the driver where there is
      # one: `doctor` tells of it, records hold the GPU's state.
      commands = {
        bake = { };
        bench = { };
        demo = { };
        doctor = { };
        generate = { };
        gpu-check.gpu = true;
        logits = { };
        ppl = { };
        sensitivity = { };
        verify = { };
      };
      app = name: { gpu ? false }: {
        type = "app";
        program = toString (
          pkgs.writeShellScript "chiku-${name}" (
            if gpu && cuda.packages ? cuda then
              "exec ${cuda.packages.cuda}/bin/chiku ${name} \"$@\""
            else
              ''
                . ${./nix/driver.sh}
                chiku_find_driver || true
                exec ${rust.chiku}/bin/chiku ${name} "$@"
              ''
          )
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
        cuda = cuda.shell self.devShells.${system}.default;
      };

      formatter.${system} = pkgs.nixfmt-tree;
    };
}
