//! Linears, plain or packed. Which one is seen from the names of the tensors; the group size is seen from their shapes.

use kernels::cpu::{Data, Matrix};
use safetensors::Dtype;

use super::{Loader, Weights, dense};
use crate::config::Strategy;
use crate::error::{Error, Result};

impl Loader<'_> {
    /// The linear `module` (a name without `.weight`) with weights `[rows, cols]`.
    pub(crate) fn linear(&self, module: &str, rows: usize, cols: usize) -> Result<Weights> {
        let (plain, packed) = (format!("{module}.weight"), format!("{module}.weight_packed"));
        match (self.files.has(&plain), self.files.has(&packed)) {
            (true, true) => Err(self.inconsistent(&plain, "stands beside a packed copy; one of the two must go")),
            (false, true) => self.packed(module, rows, cols),
            _ => {
                let tensor = self.files.require(&plain, || format!("shape [{rows}, {cols}], or `{packed}`"))?;
                dense(tensor, rows, cols)
            }
        }
    }

    fn packed(&self, module: &str, rows: usize, cols: usize) -> Result<Weights> {
        let name = |suffix: &str| format!("{module}.{suffix}");
        let Some(quantization) = self.quantization else {
            return Err(
                self.inconsistent(&name("weight_packed"), "is packed, but config.json has no quantization_config")
            );
        };
        for (suffix, what) in [("weight_zero_point", "a zero point"), ("weight_g_idx", "an activation order")] {
            if self.files.has(&name(suffix)) {
                return Err(Error::Unsupported {
                    path: self.files.dir().to_path_buf(),
                    what: format!("{what} (`{}`)", self.files.full_name(&name(suffix))),
                    hint: "this program reads symmetric weights in input order".into(),
                });
            }
        }
        let words = cols.div_ceil(8);
        let packed = self.files.require(&name("weight_packed"), || format!("I32 [{rows}, {words}]"))?;
        packed.expect_shape(&[rows, words])?;
        if packed.dtype != Dtype::I32 {
            return Err(packed.mismatch("I32"));
        }
        let shape = self.files.require(&name("weight_shape"), || "I64 [2]".into())?;
        if shape.dtype != Dtype::I64 || shape.shape != [2] {
            return Err(shape.mismatch("I64 [2]"));
        }
        let stored: Vec<i64> = shape.bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
        if stored != [rows as i64, cols as i64] {
            let reason = format!("says {stored:?}, but the configuration implies [{rows}, {cols}]");
            return Err(self.inconsistent(&name("weight_shape"), &reason));
        }
        let scales = self.files.require(&name("weight_scale"), || format!("BF16 [{rows}, groups]"))?;
        let groups = match scales.shape[..] {
            [r, groups] if r == rows && groups > 0 && cols.is_multiple_of(groups) => groups,
            _ => return Err(scales.mismatch(format!("[{rows}, a divisor of {cols}]"))),
        };
        if scales.dtype != Dtype::BF16 {
            return Err(scales.mismatch("BF16"));
        }
        // A file whose shapes and configuration disagree is another model to every other reader.
        let group = cols / groups;
        if !quantization
            .schemes
            .iter()
            .any(|s| s.strategy == Strategy::Group(group) || (groups == 1 && s.strategy == Strategy::Channel))
        {
            let found = if groups == 1 { "one scale a row".to_string() } else { format!("groups of {group}") };
            let reason = format!("has {found}, which no config group of quantization_config describes");
            return Err(self.inconsistent(&name("weight_scale"), &reason));
        }
        let data = Data::Int4 { packed: packed.bytes.clone(), scales: scales.bytes.clone(), group };
        Matrix::new(rows, cols, data).map_err(|e| scales.mismatch(e.to_string()))
    }
}
