//! How a matrix product is cut into items of work.
//!
//! The cut along k is a constant of the shape, since it decides in which order sums are added, and so which bits come out. How many blocks
//! share the items is free.

use crate::layout::{Format, TILE_CHANNELS};

/// Multiprocessors of the A10G, for which the cut is chosen. Other GPUs compute the same bits and balance worse.
const MULTIPROCESSORS: usize = 80;

/// The cut of one shape and format: `columns * segments` items, each 64 channels x `units / segments` units of inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Columns of 64 channels.
    pub columns: usize,
    /// Units of inputs: tiles.
    pub units: usize,
    /// Equal segments of k, each summed by one block.
    pub segments: usize,
}

impl Cut {
    /// The fewest segments with which 80 multiprocessors share the items evenly; where none does, the fewest with which each has two
    /// items, or else as many as there are units.
    pub fn of(format: Format, channels: usize, inputs: usize) -> Cut {
        let (columns, units) = (channels.div_ceil(TILE_CHANNELS), inputs.div_ceil(format.tile_inputs()));
        let divisors = || (1..=units).filter(|s| units.is_multiple_of(*s));
        let segments = divisors()
            .find(|s| (columns * s).is_multiple_of(MULTIPROCESSORS))
            .or_else(|| divisors().find(|s| columns * s >= 2 * MULTIPROCESSORS))
            .unwrap_or(units);
        Cut { columns, units, segments }
    }

    /// Items of work.
    pub fn items(&self) -> usize {
        self.columns * self.segments
    }

    /// Blocks for a device of so many multiprocessors: one on each, as long as there is work.
    pub fn blocks(&self, multiprocessors: u32) -> u32 {
        (multiprocessors as usize).clamp(1, self.items().max(1)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_e4b_divide_evenly_over_80_multiprocessors() {
        // (what, channels, inputs, segments, items a multiprocessor)
        for (what, channels, inputs, segments, items) in [
            ("qkv sliding", 3072, 2560, 5, 3),
            ("qkv full", 6144, 2560, 5, 6),
            ("q sliding", 2048, 2560, 5, 2),
            ("q full", 4096, 2560, 5, 4),
            ("o sliding", 2560, 2048, 2, 1),
            ("o full", 2560, 4096, 2, 1),
            ("gate and up", 20480, 2560, 1, 4),
            ("down", 2560, 10240, 2, 1),
            ("head", 12288, 2560, 5, 12),
        ] {
            for format in Format::ALL {
                let cut = Cut::of(format, channels, inputs);
                assert_eq!((cut.segments, cut.items()), (segments, items * 80), "{what}, {format:?}");
                assert_eq!(cut.blocks(80), 80);
            }
        }
    }

    #[test]
    fn per_layer_matrices_are_one_unit_a_block() {
        // Smaller than 80 units of 256 inputs: 40 multiprocessors have one each. In bf16, with units of 128, all do.
        for (channels, inputs) in [(256, 2560), (2560, 256)] {
            let cut = Cut::of(Format::Int4, channels, inputs);
            assert_eq!((cut.items(), cut.units / cut.segments), (40, 1));
            assert_eq!(Cut::of(Format::Bf16, channels, inputs).items(), 80);
        }
    }

    #[test]
    fn any_shape_has_a_cut() {
        for channels in (16..3000).step_by(48) {
            for inputs in (16..3000).step_by(112) {
                for format in Format::ALL {
                    let cut = Cut::of(format, channels, inputs);
                    assert!(cut.segments >= 1 && cut.units.is_multiple_of(cut.segments));
                    assert!(cut.columns * TILE_CHANNELS >= channels && cut.units * format.tile_inputs() >= inputs);
                    for sms in [1, 7, 72, 80, 132] {
                        assert!((1..=sms).contains(&cut.blocks(sms)));
                    }
                }
            }
        }
    }
}
