//! Vision and audio: what belongs to them, and how a bake leaves them out.
//!
//! Every bake copies them byte for byte. Without them, the configuration says null where it described them, as a text-only
//! checkpoint of the same class does.

use serde_json::Value;

use crate::plan::Plan;
use crate::roles::is_tower;

/// Fields of `config.json` that describe a tower.
const TOWER_CONFIGS: [&str; 2] = ["vision_config", "audio_config"];

impl Plan {
    /// Takes the towers out, if `yes`, and has the lineage say whether.
    pub fn set_drop_towers(&mut self, yes: bool) {
        self.lineage.knobs.insert("drop_towers".into(), yes.into());
        if yes {
            leave_out(self);
        }
    }
}

/// Tensors, configuration, ignore list.
fn leave_out(plan: &mut Plan) {
    let (mut tensors, mut bytes) = (0, 0);
    plan.jobs.retain(|job| {
        let tower = job.outputs.iter().all(|o| is_tower(&o.name));
        if tower {
            tensors += job.outputs.len();
            bytes += job.outputs.iter().map(|o| o.bytes()).sum::<u64>();
        }
        !tower
    });
    if let Some(root) = plan.config.as_object_mut() {
        for field in TOWER_CONFIGS {
            if let Some(config) = root.get_mut(field) {
                *config = Value::Null;
            }
        }
        let quantization = root.get_mut("quantization_config");
        if let Some(ignore) = quantization.and_then(|q| q.get_mut("ignore")).and_then(Value::as_array_mut) {
            ignore.retain(|module| !module.as_str().is_some_and(is_tower));
        }
    }
    plan.lineage.notes.push(match tensors {
        0 => "the parent holds no vision or audio towers to leave out".into(),
        _ => format!("{tensors} tensors of the vision and audio towers ({bytes} bytes) were left out"),
    });
}
