//! What a decode step costs at least: the bytes it must read, divided by the bandwidth.
//!
//! Everything that comes out of here is `projected`: it says what the hardware allows, not what was measured.

/// Bytes that one decode step reads, by component.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepBytes {
    /// Weights of the target, scales included, read once whatever the number of rows.
    pub weights: u64,
    /// Keys and values of the context.
    pub kv: u64,
    /// Weights of the drafter over all its passes.
    pub drafter: u64,
}

impl StepBytes {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.kv + self.drafter
    }

    /// Least time of a step in milliseconds at `gb_per_s` (10^9 bytes a second): `total / bandwidth`.
    pub fn floor_ms(&self, gb_per_s: f64) -> f64 {
        self.total() as f64 / (gb_per_s * 1e9) * 1e3
    }

    /// Most tokens a second at that bandwidth when a step yields `tokens_per_step` on average: `tokens_per_step / floor`.
    pub fn tokens_per_s_bound(&self, gb_per_s: f64, tokens_per_step: f64) -> f64 {
        tokens_per_step / (self.floor_ms(gb_per_s) / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_floor_is_reproduced() {
        // osoi5: 2086 MB a step at 517.9 GB/s gives 4.03 ms, and 889 tokens/s at 3.58 tokens a step.
        let step = StepBytes { weights: 2_086_000_000, kv: 0, drafter: 0 };
        assert!((step.floor_ms(517.9) - 4.03).abs() < 0.005);
        assert!((step.tokens_per_s_bound(517.9, 3.58) - 889.0).abs() < 1.0);
    }
}
