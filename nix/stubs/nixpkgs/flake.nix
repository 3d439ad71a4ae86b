{
  description = "Names that this project takes from nixpkgs, and nothing behind them: for evaluation without a network";
  outputs = _: { };
}
