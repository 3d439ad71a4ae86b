//! The corpus of the fuzz targets as an ordinary test, and mutations of it: no nightly compiler is needed to see that an input
//! which once mattered still behaves. `CHIKU_FUZZ_EXECUTIONS` asks for more mutations than a test run makes.

#[path = "../../../fuzz/properties.rs"]
mod properties;

use std::path::Path;

/// Mutations of each target in a test run.
const MUTATIONS: u64 = 20_000;

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus")).join(target);
    let mut paths: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() > 10, "the corpus of {target} is there");
    paths.iter().map(|p| std::fs::read(p).unwrap()).collect()
}

/// SplitMix64: the same mutations on every machine.
struct Random(u64);

impl Random {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.word() % n.max(1) as u64) as usize
    }
}

/// Texts that parsers stumble over.
const TOKENS: [&[u8]; 16] = [
    b"0",
    b"-1",
    b"18446744073709551615",
    b"9223372036854775808",
    b"1e999",
    b"null",
    b"{}",
    b"[",
    b"\"",
    b"\\ud800",
    b"true",
    b"4294967296",
    b"\"F32\"",
    b"\"BF16\"",
    b"__metadata__",
    b",",
];

fn mutate(seeds: &[Vec<u8>], random: &mut Random, out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(&seeds[random.below(seeds.len())]);
    for _ in 0..=random.below(6) {
        let at = random.below(out.len() + 1);
        let end = (at + random.below(24)).min(out.len());
        match random.below(6) {
            0 if at < out.len() => out[at] ^= 1 << random.below(8),
            1 => drop(out.drain(at..end)),
            2 => drop(out.splice(at..at, TOKENS[random.below(TOKENS.len())].iter().copied())),
            3 => drop(out.splice(at..end, TOKENS[random.below(TOKENS.len())].iter().copied())),
            4 => {
                let piece = out[at..end].to_vec();
                let to = random.below(out.len() + 1);
                out.splice(to..to, piece);
            }
            _ => {
                let other = &seeds[random.below(seeds.len())];
                let from = random.below(other.len() + 1);
                let piece = &other[from..(from + random.below(40)).min(other.len())];
                out.splice(at..end, piece.iter().copied());
            }
        }
    }
}

fn executions() -> u64 {
    std::env::var("CHIKU_FUZZ_EXECUTIONS").map_or(MUTATIONS, |n| n.parse().expect("CHIKU_FUZZ_EXECUTIONS is a number"))
}

#[test]
fn headers() {
    let seeds = corpus("header");
    seeds.iter().for_each(|s| properties::header(s));
    let (mut random, mut input) = (Random(1), Vec::new());
    let mut accepted = 0u64;
    for _ in 0..executions() {
        mutate(&seeds, &mut random, &mut input);
        // Half of them with a length that fits, so that they get as far as the JSON.
        if input.len() >= 8 && random.below(2) == 0 {
            let json = input[8..].iter().rposition(|&b| b == b'}').map_or(0, |i| i as u64 + 1);
            input[..8].copy_from_slice(&json.to_le_bytes());
        }
        properties::header(&input);
        accepted += u64::from(runtime::checkpoint::header::parse(&input, input.len() as u64).is_ok());
    }
    assert!(accepted * 200 > executions(), "only {accepted} mutations got through: the rest tests one refusal");
}

#[test]
fn configurations() {
    let seeds = corpus("config");
    seeds.iter().for_each(|s| properties::config(s));
    let (mut random, mut input) = (Random(2), Vec::new());
    for _ in 0..executions() {
        mutate(&seeds, &mut random, &mut input);
        properties::config(&input);
    }
}
