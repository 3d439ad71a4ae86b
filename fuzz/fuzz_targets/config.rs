//! `cargo +nightly fuzz run config`: the reader of `config.json` on arbitrary bytes.
#![no_main]

#[path = "../properties.rs"]
mod properties;

libfuzzer_sys::fuzz_target!(|data: &[u8]| properties::config(data));
