//! Test vectors that are the same on every device and every day: those of the emulator's tests are those of a GPU's self-test.

use half::bf16;

use crate::packing::Bits;

/// Random bits: a counter, mixed (the finaliser of MurmurHash3).
pub fn random(seed: u32, index: usize) -> u32 {
    let mut h = (index as u32).wrapping_mul(0x9e37_79b9) ^ seed.wrapping_mul(0x85eb_ca6b);
    h = (h ^ h >> 16).wrapping_mul(0x85eb_ca6b);
    h = (h ^ h >> 13).wrapping_mul(0xc2b2_ae35);
    h ^ h >> 16
}

/// From `low` up to `high`.
pub fn uniform(seed: u32, index: usize, low: f32, high: f32) -> f32 {
    low + (random(seed, index) >> 8) as f32 / (1 << 24) as f32 * (high - low)
}

/// A matrix `[n, k]` in the order of a file: packed weights of 2, 3, 4 or 8 bits and bf16 scales of `group` inputs each, the largest weights
/// about 0.1; any other width: bf16 weights up to 0.1 and no scales.
pub fn weights(bits: usize, n: usize, k: usize, group: usize) -> (Vec<u8>, Vec<u8>) {
    let seed = (n * 31 + k * 7 + group + bits) as u32;
    let Some(width) = Bits::new(bits) else {
        let weight = |i| bf16::from_f32(uniform(seed, i, -0.1, 0.1)).to_le_bytes();
        return ((0..n * k).flat_map(weight).collect(), Vec::new());
    };
    let packed = (0..n * width.words(k)).flat_map(|i| random(seed, i).to_le_bytes()).collect();
    let most = 0.1 / -width.q_min() as f32;
    let scale = |i| bf16::from_f32(uniform(!seed, i, 0.25 * most, most)).to_le_bytes();
    (packed, (0..n * k.div_ceil(group)).flat_map(scale).collect())
}

/// Inputs `[rows, k]` from -2 to 2.
pub fn inputs(rows: usize, k: usize) -> Vec<bf16> {
    (0..rows * k).map(|i| bf16::from_f32(uniform(k as u32, i, -2.0, 2.0))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_those_of_yesterday() {
        assert_eq!([random(1, 0), random(1, 1), random(2, 0)], RECORDED);
        let x = inputs(4, 1000);
        let mean = x.iter().map(|v| v.to_f32()).sum::<f32>() / x.len() as f32;
        assert!(mean.abs() < 0.1 && x.iter().all(|v| v.to_f32().abs() <= 2.0), "{mean}");
    }

    /// A change of these changes every test of kernels, and what earlier records of GPUs mean.
    const RECORDED: [u32; 3] = [0xcb72_770f, 0xdb6e_264e, 0xfebe_41f4];

    #[test]
    fn a_matrix_has_the_sizes_of_its_format() {
        for bits in [2, 3, 4, 8] {
            let (packed, scales) = weights(bits, 3, 20, 16);
            let expected = Bits::new(bits).unwrap().words(20);
            assert_eq!((packed.len(), scales.len()), (3 * expected * 4, 3 * 2 * 2), "{bits} bits");
        }
        assert_eq!(weights(16, 3, 20, 20).0.len(), 3 * 20 * 2);
        assert!(weights(16, 3, 20, 20).1.is_empty());
    }
}
