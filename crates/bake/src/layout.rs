//! Where every output tensor lies: headers of the files, positions in them, and the index of several.
//!
//! Tensors keep the plan's order, which is the parent's, so that a store that cuts files into content-defined chunks finds the
//! parent's chunks again. Each must start at a multiple of its element size (torch refuses others), and the format allows no
//! padding: where the plan's order breaks that rule, wider elements come first, as the safetensors library itself writes. A file
//! that the library wrote has that order already.

use std::collections::HashMap;

use runtime::checkpoint::SINGLE_FILE;
use serde_json::{Map, Value, json};

use crate::plan::Job;

/// One file of the output.
pub(crate) struct WeightsFile {
    /// Its name.
    pub name: String,
    /// Length field and JSON, padded.
    pub header: Vec<u8>,
    /// Bytes of its tensors.
    pub data_bytes: u64,
}

impl WeightsFile {
    /// Length.
    pub fn bytes(&self) -> u64 {
        self.header.len() as u64 + self.data_bytes
    }
}

/// All files of the output.
pub(crate) struct Layout {
    /// In order.
    pub files: Vec<WeightsFile>,
    /// (job, output) -> file, first byte in it.
    places: HashMap<(usize, usize), (usize, u64)>,
}

impl Layout {
    /// Lays out the outputs of `jobs` in at most `shards` files of about equal size. A job's outputs stay together.
    pub fn new(jobs: &[Job], metadata: &Map<String, Value>, shards: usize) -> Layout {
        let groups = split(jobs, shards.max(1));
        let count = groups.len();
        let (mut files, mut places) = (Vec::new(), HashMap::new());
        for (f, group) in groups.into_iter().enumerate() {
            let mut json = Map::new();
            json.insert("__metadata__".into(), Value::Object(metadata.clone()));
            let mut at = 0;
            let order = order(jobs, group);
            for &(j, o) in &order {
                let output = &jobs[j].outputs[o];
                let end = at + output.bytes();
                let entry = json!({"dtype": output.dtype, "shape": output.shape, "data_offsets": [at, end]});
                json.insert(output.name.clone(), entry);
                places.insert((j, o), (f, at));
                at = end;
            }
            let mut text = Value::Object(json).to_string().into_bytes();
            // The data area starts at a multiple of 8, the widest element.
            text.resize(text.len().next_multiple_of(8), b' ');
            let mut header = (text.len() as u64).to_le_bytes().to_vec();
            header.append(&mut text);
            for place in &order {
                if let Some((_, position)) = places.get_mut(place) {
                    *position += header.len() as u64;
                }
            }
            let name = match count {
                1 => SINGLE_FILE.to_string(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", f + 1),
            };
            files.push(WeightsFile { name, header, data_bytes: at });
        }
        Layout { files, places }
    }

    /// Bytes of all tensors.
    pub fn data_bytes(&self) -> u64 {
        self.files.iter().map(|f| f.data_bytes).sum()
    }

    /// Tensors in all files.
    pub fn tensors(&self) -> usize {
        self.places.len()
    }

    /// File and position in it. Every output of the jobs that the layout was made for has one.
    pub fn place(&self, job: usize, output: usize) -> (usize, u64) {
        self.places.get(&(job, output)).copied().unwrap_or_default()
    }

    /// The index of several files; `None` for one.
    pub fn index(&self, jobs: &[Job]) -> Option<Value> {
        if self.files.len() < 2 {
            return None;
        }
        let mut map = Map::new();
        for (j, job) in jobs.iter().enumerate() {
            for (o, output) in job.outputs.iter().enumerate() {
                map.insert(output.name.clone(), json!(self.files[self.place(j, o).0].name));
            }
        }
        Some(json!({"metadata": {"total_size": self.data_bytes()}, "weight_map": map}))
    }
}

/// Whether a name is one that [`Layout::new`] gives to a file of several.
pub(crate) fn is_shard_name(name: &str) -> bool {
    let numbers = name.strip_prefix("model-").and_then(|n| n.strip_suffix(".safetensors"));
    let digits = |n: &str| n.len() == 5 && n.bytes().all(|b| b.is_ascii_digit());
    numbers.and_then(|n| n.split_once("-of-")).is_some_and(|(a, b)| digits(a) && digits(b))
}

/// Consecutive jobs, as outputs, in at most `shards` groups: a group is closed once it has its share.
fn split(jobs: &[Job], shards: usize) -> Vec<Vec<(usize, usize)>> {
    let bytes = |job: &Job| job.outputs.iter().map(|o| o.bytes()).sum::<u64>();
    let share = jobs.iter().map(bytes).sum::<u64>().div_ceil(shards as u64);
    let mut groups = vec![Vec::new()];
    let mut filled = 0;
    for (j, job) in jobs.iter().enumerate() {
        if filled >= share && filled > 0 && groups.len() < shards {
            groups.push(Vec::new());
            filled = 0;
        }
        filled += bytes(job);
        if let Some(group) = groups.last_mut() {
            group.extend((0..job.outputs.len()).map(|o| (j, o)));
        }
    }
    groups
}

/// The order of one file: as it is where every tensor is then aligned, else wider elements first.
fn order(jobs: &[Job], mut group: Vec<(usize, usize)>) -> Vec<(usize, usize)> {
    let mut at = 0;
    let aligned = group.iter().all(|&(j, o)| {
        let output = &jobs[j].outputs[o];
        let start = at;
        at += output.bytes();
        (start * 8).is_multiple_of(output.dtype.bitsize() as u64)
    });
    if !aligned {
        group.sort_by_key(|&(j, o)| std::cmp::Reverse(jobs[j].outputs[o].dtype.bitsize()));
    }
    group
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::*;
    use crate::plan::Output;

    fn jobs(tensors: &[(&str, Dtype, usize)]) -> Vec<Job> {
        let job = |&(name, dtype, count): &(&str, Dtype, usize)| {
            let output = Output::new(name, dtype, &[count]);
            let bytes = vec![0; output.bytes() as usize];
            Job::bytes(output, bytes)
        };
        tensors.iter().map(job).collect()
    }

    fn names(jobs: &[Job]) -> Vec<String> {
        let layout = Layout::new(jobs, &Map::new(), 1);
        let mut places: Vec<_> =
            (0..jobs.len()).map(|j| (layout.place(j, 0), jobs[j].outputs[0].name.clone())).collect();
        places.sort();
        places.into_iter().map(|(_, name)| name).collect()
    }

    #[test]
    fn the_order_is_the_plans_unless_a_tensor_would_be_misaligned() {
        let interleaved = [("a", Dtype::I32, 2), ("b", Dtype::BF16, 4), ("c", Dtype::I64, 1), ("d", Dtype::BF16, 1)];
        assert_eq!(names(&jobs(&interleaved)), ["a", "b", "c", "d"]);
        let odd = [("a", Dtype::BF16, 3), ("b", Dtype::I32, 2), ("c", Dtype::BF16, 4), ("d", Dtype::I64, 1)];
        assert_eq!(names(&jobs(&odd)), ["d", "b", "a", "c"]);
    }

    #[test]
    fn shards_are_consecutive_and_about_equal() {
        let list: Vec<(String, usize)> = (0..40).map(|i| (format!("t{i:02}"), 100 + i)).collect();
        let list: Vec<_> = list.iter().map(|(n, c)| (n.as_str(), Dtype::BF16, *c)).collect();
        let jobs = jobs(&list);
        let layout = Layout::new(&jobs, &Map::new(), 3);
        assert_eq!(layout.files.len(), 3);
        assert_eq!(layout.files[2].name, "model-00003-of-00003.safetensors");
        assert!(layout.files.iter().all(|f| is_shard_name(&f.name)));
        assert!(!is_shard_name("model-1-of-2.safetensors") && !is_shard_name(SINGLE_FILE));
        let share = layout.data_bytes() / 3;
        assert!(layout.files.iter().all(|f| f.data_bytes.abs_diff(share) < 400), "a tensor more or less");
        let shard: Vec<usize> = (0..40).map(|j| layout.place(j, 0).0).collect();
        assert!(shard.is_sorted());
        let index = layout.index(&jobs).unwrap();
        assert_eq!(index["weight_map"].as_object().unwrap().len(), 40);
        // More files than tensors.
        assert_eq!(Layout::new(&jobs[..2], &Map::new(), 9).files.len(), 2);
        assert_eq!(Layout::new(&[], &Map::new(), 2).files.len(), 1);
    }
}
