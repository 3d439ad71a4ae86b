{
  description = "rust-overlay's overlay as this project uses it: for evaluation without a network";
  inputs.nixpkgs.url = "github:NixOS/nixpkgs";
  outputs = _: {
    overlays.default = final: prev: {
      rust-bin.fromRustupToolchainFile =
        file:
        let
          toolchain = (builtins.fromTOML (builtins.readFile file)).toolchain;
        in
        derivation {
          name = "rust-${toolchain.channel}";
          system = "x86_64-linux";
          builder = "stub";
          components = toolchain.components;
        };
    };
  };
}
