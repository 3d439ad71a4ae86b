//! `cargo +nightly fuzz run header`: the reader of safetensors headers on arbitrary bytes.
#![no_main]

#[path = "../properties.rs"]
mod properties;

libfuzzer_sys::fuzz_target!(|data: &[u8]| properties::header(data));
