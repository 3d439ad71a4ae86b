//! The best of many draws.

use serde_json::json;

use super::{Evidence, Lab, Lever};
use crate::claim::{self, ClaimReport, Rules};
use crate::error::{Error, Result};

/// Public draws, as the field's configurations of 2026 gave them; illustrative.
const PUBLIC: (f64, f64) = (481.5, 6.0);
/// Private ones.
const PRIVATE: (f64, f64) = (470.0, 3.0);
/// What was to beat, and the tolerated loss.
const RULES: Rules = Rules { sota: 489.66, gate: 0.05 };
/// Numbers of draws.
const DRAWS: [usize; 7] = [1, 4, 8, 16, 32, 64, 128];

/// See the module.
pub(super) struct BestOfN;

impl Lever for BestOfN {
    fn name(&self) -> &'static str {
        "best-of-n"
    }

    fn what(&self) -> &'static str {
        "the same configuration is run N times, and the best run is claimed"
    }

    fn prediction(&self) -> &'static str {
        "the best of N normal draws lies E[max N] standard deviations above the mean: 1.03 for 4, 1.77 for 16, 2.37 for 64"
    }

    fn mechanism(&self) -> &'static str {
        "nothing becomes faster: a maximum is chosen. A private re-run draws anew from the same mean, so beyond some N a higher claim \
         only fails more surely"
    }

    fn measure(&self, _: &mut Lab) -> Result<Evidence> {
        let side = |(mean, sd): (f64, f64)| claim::Evidence::Summary { mean, sd, n: None };
        let report = ClaimReport::new(&side(PUBLIC), &side(PRIVATE), &RULES, &DRAWS, 0.5, 1)?;
        let value = serde_json::to_value(&report).map_err(|source| Error::Encode { source })?;
        // The private mean is the same for every N: whatever is claimed, that is the speed.
        Ok(Evidence::Projected(false, json!({"inputs": "illustrative", "claim": value})))
    }
}
