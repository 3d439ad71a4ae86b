//! The header of a safetensors file: eight bytes of length, then JSON that places every tensor.
//!
//! The `safetensors` crate's own reader answers "invalid info" without the tensor's name and lets the last of two equal
//! names win; a user with a damaged 16 GB file needs to know which tensor and by how much. The rules are the crate's: the
//! tensors cover the data area exactly, in offset order, without holes or overlaps.

use std::collections::HashMap;
use std::fmt;

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

/// Largest header read, in bytes: the limit of the `safetensors` crate.
pub const HEADER_LIMIT: u64 = 100_000_000;

/// Where one tensor lies in its file.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorInfo {
    /// Full name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// First byte, counted from the start of the data area.
    pub begin: usize,
    /// One past the last byte.
    pub end: usize,
}

/// A checked header.
#[derive(Debug, Clone, Default)]
pub struct Header {
    /// All tensors, in the order of their bytes.
    pub tensors: Vec<TensorInfo>,
    /// The free-form `__metadata__` strings.
    pub metadata: HashMap<String, String>,
    /// First byte of the data area, counted from the start of the file.
    pub data_start: usize,
}

/// Why a header was refused.
#[derive(Debug, PartialEq)]
pub enum HeaderError {
    /// The file ends before the bytes that the header describes.
    Truncated {
        /// Bytes that the file should have.
        expected: u64,
    },
    /// A rule of the format is broken.
    Invalid(String),
}

#[derive(Deserialize)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// The JSON object as it stands: entries in file order, repeated names kept so that they can be refused.
struct Entries {
    tensors: Vec<(String, Entry)>,
    metadata: HashMap<String, String>,
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor;
        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = Entries;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut out = Entries { tensors: Vec::new(), metadata: HashMap::new() };
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        out.metadata = map.next_value::<Option<_>>()?.unwrap_or_default();
                    } else {
                        out.tensors.push((name, map.next_value()?));
                    }
                }
                Ok(out)
            }
        }
        deserializer.deserialize_map(EntriesVisitor)
    }
}

/// Reads and checks the header of a file of `file_len` bytes whose first bytes are `start`. `start` may be the whole file
/// (a memory map); only the header is looked at.
pub fn parse(start: &[u8], file_len: u64) -> Result<Header, HeaderError> {
    let invalid = |reason: String| HeaderError::Invalid(reason);
    let Some(length) = start.first_chunk::<8>() else {
        return Err(HeaderError::Truncated { expected: 8 });
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_LIMIT {
        return Err(invalid(format!("it declares a length of {length} bytes, more than the limit of {HEADER_LIMIT}")));
    }
    let data_start = 8 + length as usize;
    let json = match start.get(8..data_start) {
        Some(json) if file_len >= data_start as u64 => json,
        _ => return Err(HeaderError::Truncated { expected: data_start as u64 }),
    };
    let entries: Entries =
        serde_json::from_slice(json).map_err(|e| invalid(format!("not the JSON of a header: {e}")))?;

    let mut tensors: Vec<TensorInfo> = entries
        .tensors
        .into_iter()
        .map(|(name, e)| TensorInfo {
            name,
            dtype: e.dtype,
            shape: e.shape,
            begin: e.data_offsets.0,
            end: e.data_offsets.1,
        })
        .collect();
    tensors.sort_by_key(|t| (t.begin, t.end));
    let mut names = std::collections::HashSet::new();
    if let Some(twice) = tensors.iter().find(|t| !names.insert(t.name.as_str())) {
        return Err(invalid(format!("tensor `{}` is listed twice", twice.name)));
    }

    let mut at = 0usize;
    for t in &tensors {
        if t.end < t.begin {
            return Err(invalid(format!("tensor `{}` ends at {} before it begins at {}", t.name, t.end, t.begin)));
        }
        if t.begin != at {
            let what = if t.begin < at { "overlaps its neighbour" } else { "leaves a hole before it" };
            return Err(invalid(format!("tensor `{}` {what}: begins at {}, expected {at}", t.name, t.begin)));
        }
        match byte_len(t.dtype, &t.shape) {
            Some(len) if len == t.end - t.begin => {}
            Some(len) => {
                return Err(invalid(format!(
                    "tensor `{}`: {} {:?} needs {len} bytes, the offsets give {}",
                    t.name,
                    t.dtype,
                    t.shape,
                    t.end - t.begin
                )));
            }
            None => {
                return Err(invalid(format!("tensor `{}`: shape {:?} of {} is too large", t.name, t.shape, t.dtype)));
            }
        }
        at = t.end;
    }
    let expected = (data_start as u64).checked_add(at as u64);
    let expected = expected.ok_or_else(|| invalid("the offsets overflow".into()))?;
    if file_len < expected {
        return Err(HeaderError::Truncated { expected });
    }
    if file_len > expected {
        return Err(invalid(format!("{} bytes follow the last tensor", file_len - expected)));
    }
    Ok(Header { tensors, metadata: entries.metadata, data_start })
}

/// Most elements of a tensor.
const MOST_ELEMENTS: usize = 1 << 48;
/// The same of one that has none, were its dimensions of 0 left out: no byte of the file pays for what is done with its rows.
const MOST_EMPTY: usize = 1 << 24;

/// Bytes of a dense tensor; `None` where the dimensions have too large a product, those of 0 left out, or where it is no whole number of bytes.
pub fn byte_len(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let room = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d.max(1)))?;
    if room > MOST_ELEMENTS || (shape.contains(&0) && room > MOST_EMPTY) {
        return None;
    }
    let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
    let bits = elements.checked_mul(dtype.bitsize())?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut f = (json.len() as u64).to_le_bytes().to_vec();
        f.extend(json.as_bytes());
        f.resize(f.len() + data, 0);
        f
    }

    fn parsed(json: &str, data: usize) -> Result<Header, HeaderError> {
        let f = file(json, data);
        parse(&f, f.len() as u64)
    }

    fn reason(json: &str, data: usize) -> String {
        match parsed(json, data) {
            Err(HeaderError::Invalid(reason)) => reason,
            other => panic!("expected a refusal, got {other:?}"),
        }
    }

    #[test]
    fn a_good_header_is_read_in_offset_order() {
        let h = parsed(
            r#"{"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},"a":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]},"__metadata__":{"format":"pt"}}"#,
            12,
        )
        .unwrap();
        assert_eq!(h.tensors.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(h.metadata["format"], "pt");
    }

    #[test]
    fn short_files_say_how_much_is_missing() {
        assert_eq!(parse(b"abc", 3).unwrap_err(), HeaderError::Truncated { expected: 8 });
        let json = r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
        let whole = (8 + json.len() + 16) as u64;
        assert_eq!(parsed(json, 9).unwrap_err(), HeaderError::Truncated { expected: whole });
        let cut = &file(json, 0)[..20];
        assert_eq!(parse(cut, 20).unwrap_err(), HeaderError::Truncated { expected: 8 + json.len() as u64 });
    }

    #[test]
    fn a_claimed_length_is_not_allocated() {
        let mut f = u64::MAX.to_le_bytes().to_vec();
        f.extend(b"{}");
        assert!(matches!(parse(&f, 10), Err(HeaderError::Invalid(r)) if r.contains("limit")));
        let mut f = HEADER_LIMIT.to_le_bytes().to_vec();
        f.extend(b"{}");
        assert!(matches!(parse(&f, 10), Err(HeaderError::Truncated { .. })));
    }

    #[test]
    fn each_attack_is_named() {
        let two = |a: &str, b: &str| format!(r#"{{"x":{a},"y":{b}}}"#);
        let t = |s: usize, e: usize| format!(r#"{{"dtype":"U8","shape":[{}],"data_offsets":[{s},{e}]}}"#, e.max(s) - s);
        assert!(reason(&two(&t(0, 8), &t(4, 12)), 12).contains("overlaps"));
        assert!(reason(&two(&t(0, 8), &t(9, 12)), 12).contains("hole"));
        assert!(reason(&format!(r#"{{"x":{0},"x":{0}}}"#, t(0, 4)), 4).contains("twice"));
        assert!(reason(r#"{"x":{"dtype":"U8","shape":[3],"data_offsets":[4,1]}}"#, 4).contains("before"));
        assert!(reason(r#"{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#, 8).contains("needs 12 bytes"));
        let empty = format!(r#"{{"x":{{"dtype":"F32","shape":[{},0],"data_offsets":[0,0]}}}}"#, 1usize << 60);
        assert!(reason(&empty, 0).contains("too large"));
        let huge = format!(r#"{{"x":{{"dtype":"F32","shape":[{0},{0}],"data_offsets":[0,8]}}}}"#, usize::MAX);
        assert!(reason(&huge, 8).contains("too large"));
        assert!(reason(&two(&t(0, 4), &t(4, 8)), 9).contains("follow the last"));
        assert!(reason(r#"{"x":{"dtype":"Q7","shape":[3],"data_offsets":[0,8]}}"#, 8).contains("JSON"));
        assert!(reason("[1,2]", 0).contains("JSON"));
    }

    #[test]
    fn the_library_agrees_on_what_it_accepts() {
        let json = r#"{"a":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
        let f = file(json, 12);
        let (_, theirs) = safetensors::SafeTensors::read_metadata(&f).unwrap();
        for t in parse(&f, f.len() as u64).unwrap().tensors {
            let info = theirs.info(&t.name).unwrap();
            assert_eq!((info.dtype, &info.shape, info.data_offsets), (t.dtype, &t.shape, (t.begin, t.end)));
        }
    }
}
