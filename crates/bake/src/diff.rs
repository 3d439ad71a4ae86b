//! `bake diff`: which tensors differ between two checkpoints, and by how much.
//!
//! Linears are compared by what they compute with: a packed one is dequantised, so that a bake can be held against its dense
//! parent. Where the lineage of the second checkpoint says that it was made from the first by removing layers, the first is seen
//! through that removal ([`Parent::planned`]), so that layers are compared with what they were; where the second has a pruned
//! head, with the same rows of the first.

use std::collections::BTreeMap;

use half::bf16;
use rayon::prelude::*;
use runtime::checkpoint::Checkpoint;
use runtime::config::Quantization;
use safetensors::Dtype;
use serde::Serialize;
use serde_json::Value;

use crate::context::{Context, Meter};
use crate::drop_layers::{self, DropLayersOptions};
use crate::error::{Error, Result};
use crate::lineage::{self, Lineage};
use crate::parent::Parent;
use crate::prune_vocab::{self, PruneVocabOptions};
use crate::quant;
use crate::roles::{Part, Role, role};
use crate::source::Source;

mod render;

/// Result of [`run`]. The JSON keys are stable.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// Name of the first directory.
    pub a: String,
    /// Name of the second.
    pub b: String,
    /// What was done to the first, in memory, before comparing.
    pub seen_through: Vec<String>,
    /// Tensors (a packed linear is one) that are the same, byte for byte.
    pub equal: usize,
    /// All others, in the order of the second checkpoint, those of the first alone last.
    pub tensors: Vec<TensorDifference>,
    /// Fields of `config.json` that differ, after what `seen_through` changes.
    pub config: Vec<FieldDifference>,
}

impl Difference {
    /// Whether tensors and configuration are the same, as they stand.
    pub fn is_empty(&self) -> bool {
        self.seen_through.is_empty() && self.tensors.is_empty() && self.config.is_empty()
    }
}

/// What became of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// Only in the first.
    Removed,
    /// Only in the second.
    Added,
    /// Another shape: no element can be compared.
    Shape,
    /// Another type or packing; `error` says how far the values are apart.
    Type,
    /// The same type, other values.
    Values,
}

/// A tensor, or a linear with all its parts, that differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorDifference {
    /// Full name in the second checkpoint (of a linear, its module).
    pub name: String,
    /// In what.
    pub change: Change,
    /// Type and shape in the first.
    pub a: Option<String>,
    /// Type and shape in the second.
    pub b: Option<String>,
    /// How far the values are apart, for numbers of equal shape.
    pub error: Option<Distance>,
}

/// Distance of two tensors as numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Distance {
    /// Elements that are not equal.
    pub differing: u64,
    /// All elements.
    pub elements: u64,
    /// Largest difference.
    pub max_abs: f64,
    /// Root of the sum of squared differences over the sum of squares of the first; 0 where both vanish.
    pub relative_rms: f64,
}

/// A field of `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FieldDifference {
    /// Dotted name.
    pub field: String,
    /// Value in the first.
    pub a: Option<Value>,
    /// Value in the second.
    pub b: Option<Value>,
}

/// Compares two checkpoints. Progress counts the bytes of `b` that were compared.
///
/// # Errors
/// I/O errors, [`Error::NonFinite`] for weights that no distance can be taken of, [`Error::Cancelled`].
pub fn run(a: &Checkpoint, b: &Checkpoint, context: &Context) -> Result<Difference> {
    let (first, seen_through) = see_through(a, b)?;
    let second = Parent::open(b)?;
    let (left, right) = (things(&first), things(&second));
    let meter = Meter::new(context, right.iter().map(|t| t.bytes()).sum());
    let by_name: BTreeMap<&str, &Thing> = left.iter().map(|t| (t.name.as_str(), t)).collect();
    let compared: Vec<Option<TensorDifference>> = right
        .par_iter()
        .map(|thing| {
            context.check(b.dir())?;
            let difference = match by_name.get(thing.name.as_str()) {
                Some(other) => compare(other, &first, thing, &second)?,
                None => Some(thing.alone(Change::Added)),
            };
            meter.add(thing.bytes());
            Ok(difference)
        })
        .collect::<Result<_>>()?;
    let equal = compared.iter().filter(|d| d.is_none()).count();
    let mut tensors: Vec<TensorDifference> = compared.into_iter().flatten().collect();
    let kept: std::collections::HashSet<&str> = right.iter().map(|t| t.name.as_str()).collect();
    tensors.extend(left.iter().filter(|t| !kept.contains(t.name.as_str())).map(|t| t.alone(Change::Removed)));
    let mut config = Vec::new();
    fields("", Some(first.config_json()), Some(second.config_json()), &mut config);
    Ok(Difference {
        a: lineage::directory_name(a.dir()),
        b: lineage::directory_name(b.dir()),
        seen_through,
        equal,
        tensors,
        config,
    })
}

/// The first checkpoint with the layers and head rows of the second, where the second's lineage and keepset say which.
fn see_through(a: &Checkpoint, b: &Checkpoint) -> Result<(Parent, Vec<String>)> {
    let (mut seen, mut notes) = (Parent::open(a)?, Vec::new());
    for layers in removed_since(a, b)? {
        let options = DropLayersOptions { layers: layers.clone(), ..Default::default() };
        seen = Parent::planned(drop_layers::plan(&seen, &options)?, &seen)?;
        notes.push(format!("without layers {layers:?}"));
    }
    let fewer = |keep: &runtime::checkpoint::Keepset| seen.keepset() != Some(keep) && !b.config().tie_word_embeddings;
    if let Some(keep) = b.keepset().filter(|k| fewer(k)) {
        match prune_vocab::plan(&seen, keep, &PruneVocabOptions::default()) {
            Ok(plan) => {
                notes.push(format!("with the {} head rows of the second", keep.ids.len()));
                seen = Parent::planned(plan, &seen)?;
            }
            // Rows that the first does not have: the heads are compared as they are.
            Err(Error::Keepset { .. }) => {}
            Err(e) => return Err(e),
        }
    }
    Ok((seen, notes))
}

/// The removals of layers between `a` and `b`, oldest first, where `b`'s lineage leads back to `a`; else none.
fn removed_since(a: &Checkpoint, b: &Checkpoint) -> Result<Vec<Vec<usize>>> {
    let mut removals = Vec::new();
    let mut generation = Lineage::read(b.dir())?;
    while let Some(lineage) = generation {
        for (bake, knobs) in lineage.bakes().into_iter().rev() {
            if bake == "drop-layers"
                && let Some(layers) = knobs.get("layers").and_then(Value::as_array)
            {
                removals.push(layers.iter().filter_map(Value::as_u64).map(|l| l as usize).collect());
            }
        }
        let Some(parent) = lineage.parent else { break };
        if parent.is(a)? {
            removals.reverse();
            return Ok(removals);
        }
        // A lineage of another layout of the file ends the search.
        generation = parent.lineage.and_then(|value| serde_json::from_value(value).ok());
    }
    Ok(vec![])
}

/// What is compared as one: a tensor, or the parts of a packed linear.
struct Thing<'a> {
    name: String,
    parts: BTreeMap<&'static str, &'a Source>,
}

const WHOLE: &str = "";

fn things(parent: &Parent) -> Vec<Thing<'_>> {
    let mut out: Vec<Thing> = Vec::new();
    let mut places: BTreeMap<String, usize> = BTreeMap::new();
    for source in parent.sources() {
        let (name, part) = match role(parent.prefix(), &source.name) {
            Role::Linear(linear, part) => (linear.module(parent.prefix()), part.suffix()),
            _ => (source.name.clone(), WHOLE),
        };
        let place = *places.entry(name.clone()).or_insert_with(|| {
            out.push(Thing { name, parts: BTreeMap::new() });
            out.len() - 1
        });
        out[place].parts.insert(part, source);
    }
    out
}

impl Thing<'_> {
    fn bytes(&self) -> u64 {
        self.parts.values().map(|s| s.len()).sum()
    }

    /// The tensor that decides type and shape.
    fn main(&self) -> Option<&Source> {
        [WHOLE, Part::Dense.suffix(), Part::Packed.suffix()].iter().find_map(|p| self.parts.get(p).copied())
    }

    fn describe(&self) -> String {
        match (self.parts.get(Part::Scale.suffix()), self.main()) {
            (Some(scale), Some(packed)) => format!("packed {}, scales {}", packed.describe(), scale.describe()),
            (_, Some(main)) => main.describe(),
            (_, None) => format!("parts {:?} only", self.parts.keys().collect::<Vec<_>>()),
        }
    }

    fn alone(&self, change: Change) -> TensorDifference {
        let said = Some(self.describe());
        let (a, b) = if change == Change::Removed { (said, None) } else { (None, said) };
        TensorDifference { name: self.name.clone(), change, a, b, error: None }
    }

    fn numbers<'s>(&'s self, parent: &'s Parent) -> Result<Option<Numbers<'s>>> {
        if let Some(source) = [WHOLE, Part::Dense.suffix()].iter().find_map(|p| self.parts.get(p).copied()) {
            let float = matches!(source.dtype, Dtype::BF16 | Dtype::F32);
            return Ok(float.then_some(Numbers { source, shape: source.shape.clone(), packing: None }));
        }
        let part = |p: Part| self.parts.get(p.suffix()).copied();
        let (Some(packed), Some(scale), Some(shape)) = (part(Part::Packed), part(Part::Scale), part(Part::Shape))
        else {
            return Ok(None);
        };
        let shape = shape.read_pair()?.map(|n| usize::try_from(n).unwrap_or(0));
        let quantization: Option<&Quantization> = parent.config().quantization.as_ref();
        let Some(packing) = quantization.and_then(|q| q.packing(&self.name, shape[1]).ok()) else { return Ok(None) };
        let fits = packed.shape == [shape[0], packing.words] && scale.shape == [shape[0], packing.groups];
        let packing = (packing.scheme.bits, packing.group, scale);
        Ok(fits.then_some(Numbers { source: packed, shape: shape.to_vec(), packing: Some(packing) }))
    }
}

/// A tensor as numbers, row by row.
struct Numbers<'a> {
    source: &'a Source,
    shape: Vec<usize>,
    /// Width, inputs a scale, scales.
    packing: Option<(quant::Bits, usize, &'a Source)>,
}

impl Numbers<'_> {
    fn width(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// Fills `out` with whole rows from row `first` on.
    fn read(&self, first: usize, out: &mut [f32], scratch: &mut Vec<u8>) -> Result<()> {
        let width = self.width();
        let Some((bits, group, scales)) = self.packing else {
            return self.source.read_f32(first * width, out, scratch);
        };
        let rows = out.len() / width.max(1);
        let (word_bytes, groups) = (self.source.row_bytes(), scales.row_elements());
        let mut values = vec![0.0; rows * groups];
        scales.read_f32(first * groups, &mut values, scratch)?;
        scratch.resize(rows * word_bytes, 0);
        self.source.read_rows(first, scratch)?;
        let mut fields = vec![0; width];
        for (r, out) in out.chunks_exact_mut(width.max(1)).enumerate() {
            let bytes = &scratch[r * word_bytes..(r + 1) * word_bytes];
            let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
            for (i, f) in fields.iter_mut().enumerate() {
                *f = bits.field(&words, i) as u8;
            }
            let scales: Vec<bf16> = values[r * groups..(r + 1) * groups].iter().map(|v| bf16::from_f32(*v)).collect();
            quant::dequantise_row(&fields, &scales, group, bits, out);
        }
        Ok(())
    }
}

/// Bytes or elements handled at a time.
const BATCH: usize = 1 << 18;

fn compare(a: &Thing, first: &Parent, b: &Thing, second: &Parent) -> Result<Option<TensorDifference>> {
    let same_parts = a.parts.keys().eq(b.parts.keys());
    let alike = |(x, y): (&&Source, &&Source)| x.dtype == y.dtype && x.shape == y.shape;
    let same_type = same_parts && a.parts.values().zip(b.parts.values()).all(alike);
    if same_type {
        let mut equal = true;
        for (x, y) in a.parts.values().zip(b.parts.values()) {
            equal = equal && same_bytes(x, y)?;
        }
        if equal {
            return Ok(None);
        }
    }
    let numbers = (a.numbers(first)?, b.numbers(second)?);
    let change = if same_type { Change::Values } else { Change::Type };
    let (change, error) = match numbers {
        (Some(x), Some(y)) if x.shape == y.shape => (change, Some(distance(&x, &y)?)),
        (Some(_), Some(_)) => (Change::Shape, None),
        _ if same_type => (Change::Values, None),
        _ => (Change::Type, None),
    };
    Ok(Some(TensorDifference { name: b.name.clone(), change, a: Some(a.describe()), b: Some(b.describe()), error }))
}

fn same_bytes(x: &Source, y: &Source) -> Result<bool> {
    let rows = (BATCH / x.row_bytes().max(1)).max(1) * x.row_bytes().max(1);
    let (mut left, mut right) = (Vec::new(), Vec::new());
    for at in (0..x.len()).step_by(rows) {
        let count = rows.min((x.len() - at) as usize);
        left.resize(count, 0);
        right.resize(count, 0);
        x.read_at(at, &mut left)?;
        y.read_at(at, &mut right)?;
        if left != right {
            return Ok(false);
        }
    }
    Ok(true)
}

fn distance(x: &Numbers, y: &Numbers) -> Result<Distance> {
    let width = x.width();
    let rows = x.shape.first().copied().unwrap_or(1);
    let batch = (BATCH / width.max(1)).max(1);
    let starts: Vec<usize> = (0..rows).step_by(batch).collect();
    let parts: Vec<Sums> = starts
        .into_par_iter()
        .map_init(
            || (Vec::new(), Vec::new(), Vec::new()),
            |(left, right, scratch), start| {
                let count = batch.min(rows - start) * width;
                left.resize(count, 0.0);
                right.resize(count, 0.0);
                x.read(start, left, scratch)?;
                y.read(start, right, scratch)?;
                Ok::<Sums, Error>(Sums::of(left, right))
            },
        )
        .collect::<Result<_>>()?;
    Ok(parts.into_iter().fold(Sums::default(), Sums::plus).distance())
}

#[derive(Default)]
struct Sums {
    differing: u64,
    elements: u64,
    max_abs: f64,
    squared_error: f64,
    squares: f64,
}

impl Sums {
    fn of(left: &[f32], right: &[f32]) -> Sums {
        let mut sums = Sums { elements: left.len() as u64, ..Sums::default() };
        for (&l, &r) in left.iter().zip(right) {
            let e = (f64::from(l) - f64::from(r)).abs();
            sums.differing += u64::from(e > 0.0);
            sums.max_abs = sums.max_abs.max(e);
            sums.squared_error += e * e;
            sums.squares += f64::from(l) * f64::from(l);
        }
        sums
    }

    fn plus(self, other: Sums) -> Sums {
        Sums {
            differing: self.differing + other.differing,
            elements: self.elements + other.elements,
            max_abs: self.max_abs.max(other.max_abs),
            squared_error: self.squared_error + other.squared_error,
            squares: self.squares + other.squares,
        }
    }

    fn distance(self) -> Distance {
        // Against nothing, any error is whole.
        let relative_rms = match (self.squared_error, self.squares) {
            (0.0, _) => 0.0,
            (_, 0.0) => 1.0,
            (error, squares) => (error / squares).sqrt(),
        };
        Distance { differing: self.differing, elements: self.elements, max_abs: self.max_abs, relative_rms }
    }
}

/// Collects the leaves that differ. Lists are leaves.
fn fields(name: &str, a: Option<&Value>, b: Option<&Value>, out: &mut Vec<FieldDifference>) {
    match (a, b) {
        (Some(Value::Object(x)), Some(Value::Object(y))) => {
            let added = y.keys().filter(|k| !x.contains_key(*k));
            for key in x.keys().chain(added) {
                let inner = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                fields(&inner, x.get(key), y.get(key), out);
            }
        }
        _ if a == b => {}
        _ => out.push(FieldDifference { field: name.to_string(), a: a.cloned(), b: b.cloned() }),
    }
}
