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

/// Memory bandwidth of a device in GB/s (10^9 bytes a second), and its size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceProfile {
    /// Name on the command line.
    pub name: &'static str,
    /// What it is.
    pub description: &'static str,
    /// By the data sheet: bus width times transfer rate.
    pub nominal_gb_s: f64,
    /// Most that a stream of reads has reached; `None` where nobody measured one.
    pub read_gb_s: Option<f64>,
    /// Most that a copy has reached, read and written bytes counted; `None` where nobody measured one.
    pub copy_gb_s: Option<f64>,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Where the numbers come from.
    pub source: &'static str,
}

impl DeviceProfile {
    /// The bandwidth that weights can be read with: measured reads where there are any, else the data sheet.
    pub fn gb_s(&self) -> f64 {
        self.read_gb_s.unwrap_or(self.nominal_gb_s)
    }

    /// A profile by name.
    pub fn by_name(name: &str) -> Option<&'static DeviceProfile> {
        DEVICES.iter().find(|d| d.name == name)
    }
}

/// Devices whose numbers are published.
pub const DEVICES: [DeviceProfile; 4] = [
    DeviceProfile {
        name: "a10g",
        description: "NVIDIA A10G, 24 GB GDDR6",
        nominal_gb_s: 600.0,
        read_gb_s: Some(517.9),
        copy_gb_s: Some(481.0),
        sms: 80,
        source: "data sheet; stream reads of 517.6 to 517.9 GB/s and fp16 copies of 480.3 to 481 GB/s were published for it",
    },
    DeviceProfile {
        name: "a10",
        description: "NVIDIA A10, 24 GB GDDR6",
        nominal_gb_s: 600.2,
        read_gb_s: None,
        copy_gb_s: None,
        sms: 72,
        source: "data sheet: 384 bit at 12.5 Gb/s",
    },
    DeviceProfile {
        name: "rtx3090",
        description: "NVIDIA GeForce RTX 3090, 24 GB GDDR6X",
        nominal_gb_s: 936.0,
        read_gb_s: None,
        copy_gb_s: None,
        sms: 82,
        source: "data sheet: 384 bit at 19.5 Gb/s",
    },
    DeviceProfile {
        name: "h200",
        description: "NVIDIA H200, 141 GB HBM3e",
        nominal_gb_s: 4800.0,
        read_gb_s: None,
        copy_gb_s: None,
        sms: 132,
        source: "data sheet",
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names_of_their_own_and_possible_numbers() {
        for d in &DEVICES {
            assert_eq!(DeviceProfile::by_name(d.name), Some(d));
            let measured = [d.read_gb_s, d.copy_gb_s].into_iter().flatten();
            assert!(d.nominal_gb_s > 0.0 && measured.into_iter().all(|m| m > 0.0 && m < d.nominal_gb_s));
        }
        assert_eq!(DeviceProfile::by_name("a10g").unwrap().gb_s(), 517.9);
        assert_eq!(DeviceProfile::by_name("h100"), None);
    }

    #[test]
    fn the_published_floor_is_reproduced() {
        // osoi5: 2086 MB a step at 517.9 GB/s gives 4.03 ms, and 889 tokens/s at 3.58 tokens a step.
        let step = StepBytes { weights: 2_086_000_000, kv: 0, drafter: 0 };
        assert!((step.floor_ms(517.9) - 4.03).abs() < 0.005);
        assert!((step.tokens_per_s_bound(517.9, 3.58) - 889.0).abs() < 1.0);
    }
}
