//! chiku
fn main() {}
