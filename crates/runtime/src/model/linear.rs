//! Linears, plain or packed. Which one is seen from the names of the tensors; width and group size are those of the config group
//! that targets the module, and the shapes must agree with it.

use kernels::cpu::{Data, Matrix};
use safetensors::Dtype;

use super::{Loader, Weights, dense};
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
        // A file whose shapes and configuration disagree is another model to every other reader.
        let packing = quantization
            .packing(&self.files.full_name(module), cols)
            .map_err(|reason| self.inconsistent(&name("weight_packed"), &reason))?;
        let words = packing.words;
        let expected = format!("I32 [{rows}, {words}] ({packing})");
        let packed = self.files.require(&name("weight_packed"), || expected.clone())?;
        if packed.dtype != Dtype::I32 || packed.shape != [rows, words] {
            return Err(packed.mismatch(expected));
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
        let expected = format!("BF16 [{rows}, {}] ({packing})", packing.groups);
        let scales = self.files.require(&name("weight_scale"), || expected.clone())?;
        if scales.dtype != Dtype::BF16 || scales.shape != [rows, packing.groups] {
            return Err(scales.mismatch(expected));
        }
        let data = Data::Packed {
            bits: packing.scheme.bits,
            packed: packed.bytes.clone(),
            scales: scales.bytes.clone(),
            group: packing.group,
        };
        Matrix::new(rows, cols, data).map_err(|e| scales.mismatch(e.to_string()))
    }
}
