//! The machine code that was built into this program: every family of `kernels/` for every architecture, compressed.
//!
//! The build takes the folder that `kernels/build.py --out` filled, named by `CHIKU_CUBINS`. With the feature `cuda` there must be one.

use super::DeviceError;

/// What an image runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// PTX of compute capability major * 10 + minor, which a driver of CUDA 12.4 or later compiles for any later GPU.
    Ptx(u32),
    /// A cubin for that capability and later ones of the same major number.
    Sm(u32),
}

/// One family's kernels for one target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Image {
    /// Name of the .cu without its ending.
    pub family: &'static str,
    /// What it runs on.
    pub target: Target,
    compressed: &'static [u8],
}

include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// All that there are, by family and target; none in a build without `CHIKU_CUBINS`.
pub fn images() -> &'static [Image] {
    IMAGES
}

impl Image {
    /// The image as the driver takes it.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] where the program itself is damaged.
    pub fn bytes(&self) -> Result<Vec<u8>, DeviceError> {
        lz4_flex::decompress_size_prepended(self.compressed)
            .map_err(|e| DeviceError::Unavailable(format!("the image of {} in this program: {e}", self.family)))
    }
}

/// The target that serves a GPU best, of those that there are.
fn best(targets: impl Iterator<Item = Target>, major: u32, minor: u32) -> Option<Target> {
    let capability = major * 10 + minor;
    targets
        .filter(|target| match *target {
            Target::Sm(sm) => sm / 10 == major && sm <= capability,
            Target::Ptx(compute) => compute <= capability,
        })
        .max()
}

/// Every family's image for a GPU of that compute capability.
pub(super) fn for_capability(major: u32, minor: u32) -> Result<Vec<Vec<u8>>, DeviceError> {
    if IMAGES.is_empty() {
        return Err(DeviceError::Unavailable(
            "this build has no code for a GPU; build with `--features cuda` (README.md, \"On an A10G\")".into(),
        ));
    }
    let Some(target) = best(IMAGES.iter().map(|i| i.target), major, minor) else {
        return Err(DeviceError::Unavailable(format!("this build has no code that runs on sm_{major}{minor}")));
    };
    IMAGES.iter().filter(|i| i.target == target).map(Image::bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_gets_the_latest_code_that_runs_on_it() {
        let all = [Target::Sm(80), Target::Sm(86), Target::Sm(90), Target::Ptx(80)];
        let best = |major, minor| best(all.into_iter(), major, minor);
        assert_eq!(best(8, 0), Some(Target::Sm(80)));
        assert_eq!(best(8, 6), Some(Target::Sm(86)));
        assert_eq!(best(8, 9), Some(Target::Sm(86)));
        assert_eq!(best(9, 0), Some(Target::Sm(90)));
        assert_eq!(best(12, 0), Some(Target::Ptx(80)));
        assert_eq!(best(7, 5), None);
    }

    #[test]
    fn every_family_is_there_for_every_target_or_none_is() {
        let mut families: Vec<&str> = images().iter().map(|i| i.family).collect();
        families.dedup();
        let given = option_env!("CHIKU_CUBINS").is_some_and(|folder| !folder.is_empty());
        assert_eq!(given, !families.is_empty());
        assert_eq!(images().len(), families.len() * 4);
        for image in images() {
            let bytes = image.bytes().unwrap();
            match image.target {
                Target::Sm(_) => assert_eq!(&bytes[..4], b"\x7fELF", "{image:?}"),
                Target::Ptx(_) => {
                    assert!(String::from_utf8(bytes).unwrap().contains(".target sm_80"), "{}", image.family)
                }
            }
        }
    }

    #[test]
    fn every_kernel_of_the_recorded_table_is_in_the_code_for_every_target() {
        // Objects two levels deep are kernels.
        let table = include_str!("../../../../kernels/resources.json");
        let kernels: Vec<&str> = table.lines().filter_map(|l| l.strip_prefix("  \"")?.strip_suffix("\": {")).collect();
        assert!(kernels.len() > 30 && kernels.contains(&"probe_read"), "{kernels:?}");
        for target in [Target::Sm(80), Target::Sm(86), Target::Sm(90), Target::Ptx(80)] {
            let code: Vec<u8> =
                images().iter().filter(|i| i.target == target).flat_map(|i| i.bytes().unwrap()).collect();
            let code = String::from_utf8_lossy(&code);
            let missing: Vec<&&str> =
                kernels.iter().filter(|name| !images().is_empty() && !code.contains(**name)).collect();
            assert!(missing.is_empty(), "{target:?} lacks {missing:?}");
        }
    }
}
