//! The weights of a checkpoint, bound to the roles they play and checked against the configuration.
//!
//! After [`Model::load`] every matrix has the shape that the forward pass relies on. Matrices stay in the memory map; only
//! norms and scalars are copied (as f32).

use std::sync::Arc;

use kernels::cpu::{Data, Matrix};
use safetensors::Dtype;

use crate::checkpoint::{Bytes, Checkpoint, Tensor, TensorFiles};
use crate::config::{LayerConfig, ModelConfig, Quantization};
use crate::error::{Error, Result};
use crate::names;

mod head;
mod linear;

pub use head::HeadRows;

/// A matrix in the memory map.
pub type Weights = Matrix<Bytes>;

/// Key and value side of a layer that has its own.
#[derive(Clone)]
pub(crate) struct KvWeights {
    pub k_proj: Weights,
    pub v_proj: Weights,
    pub k_norm: Vec<f32>,
}

/// Per-layer input side of a layer.
#[derive(Clone)]
pub(crate) struct PleWeights {
    pub gate: Weights,
    pub projection: Weights,
    pub post_norm: Vec<f32>,
}

/// What every layer has, a drafter's too: queries, the output of attention, the MLP, and the norms around them.
#[derive(Clone)]
pub(crate) struct BlockWeights {
    pub input_norm: Vec<f32>,
    pub post_attention_norm: Vec<f32>,
    pub pre_feedforward_norm: Vec<f32>,
    pub post_feedforward_norm: Vec<f32>,
    pub q_proj: Weights,
    pub q_norm: Vec<f32>,
    pub o_proj: Weights,
    pub gate_proj: Weights,
    pub up_proj: Weights,
    pub down_proj: Weights,
    pub scalar: f32,
    /// Inverse frequencies `[head_dim / 2]` of the rotary embedding.
    pub inv_freq: Vec<f32>,
}

/// One decoder layer of a target.
#[derive(Clone)]
pub(crate) struct LayerWeights {
    pub block: BlockWeights,
    pub kv: Option<KvWeights>,
    pub ple: Option<PleWeights>,
}

/// Per-layer embeddings: what is computed once a token, before the layers.
#[derive(Clone)]
pub(crate) struct PleTables {
    /// `[vocab, stored layers * ple]`.
    embed: Weights,
    /// Layer of the table that each layer reads: a variant without some layers shares the table of the whole model.
    blocks: Vec<usize>,
    /// `[layers * ple, hidden]`.
    pub projection: Weights,
    pub norm: Vec<f32>,
}

impl PleTables {
    /// What the table holds of a token, `[layers * ple]`.
    pub fn look_up(&self, token: u32, ple: usize) -> Vec<f32> {
        let (embed, mut out) = (self.embed.view(), vec![0.0; self.blocks.len() * ple]);
        for (out, &block) in out.chunks_exact_mut(ple).zip(&self.blocks) {
            embed.expand(token as usize, block * ple, out);
        }
        out
    }
}

/// A loaded model. A clone shares the weights: only norms and scalars are copied.
#[derive(Clone)]
pub struct Model {
    checkpoint: Arc<Checkpoint>,
    config: Arc<ModelConfig>,
    /// `[vocab, hidden]`.
    pub(crate) embed: Weights,
    pub(crate) ple: Option<PleTables>,
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) final_norm: Vec<f32>,
    /// `None`: the head is the embedding.
    untied_head: Option<Weights>,
    head_rows: Arc<HeadRows>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("dir", &self.checkpoint.dir()).finish_non_exhaustive()
    }
}

impl Model {
    /// Binds every weight that the configuration implies. Keys and values stored for KV-shared layers are not looked at.
    pub fn load(checkpoint: Checkpoint) -> Result<Model> {
        let config = checkpoint.config();
        let loader = Loader { files: &checkpoint, quantization: config.quantization.as_ref() };
        let embed = loader.table(names::EMBED, config.vocab_size, config.hidden_size)?;
        let ple = loader.ple_tables(config)?;
        let layers = (0..config.layers.len()).map(|l| loader.layer(l, config)).collect::<Result<_>>()?;
        let final_norm = loader.vector(names::FINAL_NORM, config.hidden_size)?;
        let (untied_head, head_rows) = head::load(&loader, &checkpoint)?;
        Ok(Model {
            embed,
            ple,
            layers,
            final_norm,
            untied_head,
            head_rows: Arc::new(head_rows),
            config: Arc::new(config.clone()),
            checkpoint: Arc::new(checkpoint),
        })
    }

    /// The configuration: the checkpoint's own, less the layers that [`Model::without_layers`] took.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The checkpoint that the weights lie in, or did before [`Model::set_weights`].
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The head `[head rows, hidden]`.
    pub(crate) fn head(&self) -> &Weights {
        self.untied_head.as_ref().unwrap_or(&self.embed)
    }

    /// Which tokens the head's rows stand for.
    pub fn head_rows(&self) -> &Arc<HeadRows> {
        &self.head_rows
    }

    /// Inverse frequencies `[head_dim / 2]` of a layer's rotary embedding.
    pub fn inverse_frequencies(&self, layer: usize) -> &[f32] {
        &self.layers[layer].block.inv_freq
    }

    /// A linear by the name of its module (`lm_head`, `layers.3.mlp.down_proj`), for tools that look at weights; `None` where
    /// this model has none of that name.
    pub fn weights(&self, module: &str) -> Option<&Weights> {
        match module {
            names::LM_HEAD => return Some(self.head()),
            names::PLE_MODEL_PROJECTION => return self.ple.as_ref().map(|p| &p.projection),
            _ => {}
        }
        let (index, rest) = names::split_layer(module)?;
        let layer = self.layers.get(index)?;
        match rest {
            "self_attn.q_proj" => Some(&layer.block.q_proj),
            "self_attn.k_proj" => layer.kv.as_ref().map(|kv| &kv.k_proj),
            "self_attn.v_proj" => layer.kv.as_ref().map(|kv| &kv.v_proj),
            "self_attn.o_proj" => Some(&layer.block.o_proj),
            "mlp.gate_proj" => Some(&layer.block.gate_proj),
            "mlp.up_proj" => Some(&layer.block.up_proj),
            "mlp.down_proj" => Some(&layer.block.down_proj),
            "per_layer_input_gate" => layer.ple.as_ref().map(|p| &p.gate),
            "per_layer_projection" => layer.ple.as_ref().map(|p| &p.projection),
            _ => None,
        }
    }

    /// Replaces a linear, so that a variant of a model can be tried without writing a checkpoint.
    ///
    /// # Errors
    /// [`Error::Inconsistent`] where this model has no linear of that name, or one of another shape.
    pub fn set_weights(&mut self, module: &str, weights: Weights) -> Result<()> {
        let wrong = |reason: String| Error::Inconsistent {
            path: self.checkpoint.dir().to_path_buf(),
            tensor: module.to_string(),
            reason,
        };
        let found = self.weights(module).ok_or_else(|| wrong("is no linear of this model".into()))?;
        let (shape, given) = ([found.rows(), found.cols()], [weights.rows(), weights.cols()]);
        if shape != given {
            return Err(wrong(format!("is {shape:?}, and its replacement is {given:?}")));
        }
        match self.place(module) {
            Some(place) => *place = weights,
            // The one linear that may have no place of its own: a head tied to the embedding.
            None => self.untied_head = Some(weights),
        }
        Ok(())
    }

    /// The same model without some layers (numbers of this model), without a checkpoint: what `bake drop-layers` would write. The
    /// table of per-layer embeddings is shared, of `per_layer_model_projection` the remaining rows are copied.
    ///
    /// # Errors
    /// [`Error::Layers`]: see [`ModelConfig::survivors`].
    pub fn without_layers(&self, drop: &[usize]) -> Result<Model> {
        let keep = self.config.survivors(drop)?;
        let size = self.config.ple_size;
        let ple = self.ple.as_ref().map(|ple| {
            let rows: Vec<usize> = keep.iter().flat_map(|l| l * size..(l + 1) * size).collect();
            PleTables {
                embed: ple.embed.clone(),
                blocks: keep.iter().map(|&l| ple.blocks[l]).collect(),
                projection: ple.projection.select_rows(&rows),
                norm: ple.norm.clone(),
            }
        });
        Ok(Model {
            checkpoint: self.checkpoint.clone(),
            config: Arc::new(self.config.with_layers(&keep)),
            embed: self.embed.clone(),
            ple,
            layers: keep.iter().map(|&l| self.layers[l].clone()).collect(),
            final_norm: self.final_norm.clone(),
            untied_head: self.untied_head.clone(),
            head_rows: self.head_rows.clone(),
        })
    }

    fn place(&mut self, module: &str) -> Option<&mut Weights> {
        match module {
            names::LM_HEAD => return self.untied_head.as_mut(),
            names::PLE_MODEL_PROJECTION => return self.ple.as_mut().map(|p| &mut p.projection),
            _ => {}
        }
        let (index, rest) = names::split_layer(module)?;
        let layer = self.layers.get_mut(index)?;
        match rest {
            "self_attn.q_proj" => Some(&mut layer.block.q_proj),
            "self_attn.k_proj" => layer.kv.as_mut().map(|kv| &mut kv.k_proj),
            "self_attn.v_proj" => layer.kv.as_mut().map(|kv| &mut kv.v_proj),
            "self_attn.o_proj" => Some(&mut layer.block.o_proj),
            "mlp.gate_proj" => Some(&mut layer.block.gate_proj),
            "mlp.up_proj" => Some(&mut layer.block.up_proj),
            "mlp.down_proj" => Some(&mut layer.block.down_proj),
            "per_layer_input_gate" => layer.ple.as_mut().map(|p| &mut p.gate),
            "per_layer_projection" => layer.ple.as_mut().map(|p| &mut p.projection),
            _ => None,
        }
    }

    /// Bytes of the matrices that one decode step multiplies with, each read once whatever the number of rows: the layers'
    /// linears, the PLE model projection and the head. Embedding look-ups and norms are not in it.
    pub fn step_weight_bytes(&self) -> u64 {
        self.step_linears().map(Weights::bytes).sum::<usize>() as u64
    }

    /// The same on a device, where int3 has no unused bits.
    pub fn step_device_bytes(&self) -> u64 {
        self.step_linears().map(Weights::device_bytes).sum::<usize>() as u64
    }

    /// The matrices of [`Model::step_weight_bytes`].
    fn step_linears(&self) -> impl Iterator<Item = &Weights> {
        let of_layer =
            move |l| names::LAYER_LINEARS.iter().filter_map(move |rest| self.weights(&names::layer(l, rest)));
        let layers = (0..self.layers.len()).flat_map(of_layer);
        [self.head()].into_iter().chain(self.weights(names::PLE_MODEL_PROJECTION)).chain(layers)
    }
}

/// Frequencies of a layer's rotary embedding: `theta^(-2m/D) / factor` for the rotating pairs, 0 for the others. The exponent
/// divides by the whole head size also where only a part rotates.
fn inverse_frequencies(layer: &LayerConfig) -> Vec<f32> {
    let (rope, dim) = (layer.rope, layer.head_dim);
    let frequency = |m: usize| match m < rope.rotating_pairs {
        true => (rope.theta.powf(-2.0 * m as f64 / dim as f64) / rope.factor) as f32,
        false => 0.0,
    };
    (0..dim / 2).map(frequency).collect()
}

/// Looks tensors up and checks them.
pub(crate) struct Loader<'a> {
    pub files: &'a TensorFiles,
    /// What the configuration says of packed linears; `None` where there may be none.
    pub quantization: Option<&'a Quantization>,
}

impl Loader<'_> {
    /// A vector as f32.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let tensor = self.files.require(name, || format!("shape [{len}]"))?;
        tensor.expect_shape(&[len])?;
        tensor.to_f32()
    }

    /// An unpacked table.
    pub fn table(&self, name: &str, rows: usize, cols: usize) -> Result<Weights> {
        let tensor = self.files.require(name, || format!("shape [{rows}, {cols}]"))?;
        dense(tensor, rows, cols)
    }

    /// What layer `l` has whatever the model. `hidden` is the width of the residual stream.
    pub fn block(&self, l: usize, layer: &LayerConfig, hidden: usize, heads: usize) -> Result<BlockWeights> {
        let (q_width, wide) = (heads * layer.head_dim, layer.intermediate_size);
        let vector = |rest: &str, len| self.vector(&names::layer(l, rest), len);
        let linear = |rest: &str, rows, cols| self.linear(&names::layer(l, rest), rows, cols);
        Ok(BlockWeights {
            input_norm: vector("input_layernorm.weight", hidden)?,
            post_attention_norm: vector("post_attention_layernorm.weight", hidden)?,
            pre_feedforward_norm: vector("pre_feedforward_layernorm.weight", hidden)?,
            post_feedforward_norm: vector("post_feedforward_layernorm.weight", hidden)?,
            q_proj: linear("self_attn.q_proj", q_width, hidden)?,
            q_norm: vector("self_attn.q_norm.weight", layer.head_dim)?,
            o_proj: linear("self_attn.o_proj", hidden, q_width)?,
            gate_proj: linear("mlp.gate_proj", wide, hidden)?,
            up_proj: linear("mlp.up_proj", wide, hidden)?,
            down_proj: linear("mlp.down_proj", hidden, wide)?,
            scalar: vector("layer_scalar", 1)?[0],
            inv_freq: inverse_frequencies(layer),
        })
    }

    fn ple_tables(&self, config: &ModelConfig) -> Result<Option<PleTables>> {
        let ple = config.ple_size;
        if ple == 0 {
            return Ok(None);
        }
        let width = config.layers.len() * ple;
        Ok(Some(PleTables {
            embed: self.table(names::EMBED_PER_LAYER, config.vocab_size, width)?,
            blocks: (0..config.layers.len()).collect(),
            projection: self.linear(names::PLE_MODEL_PROJECTION, width, config.hidden_size)?,
            norm: self.vector(names::PLE_NORM, ple)?,
        }))
    }

    fn layer(&self, l: usize, config: &ModelConfig) -> Result<LayerWeights> {
        let (layer, hidden) = (&config.layers[l], config.hidden_size);
        let kv_width = layer.kv_heads * layer.head_dim;
        let vector = |rest: &str, len| self.vector(&names::layer(l, rest), len);
        let linear = |rest: &str, rows, cols| self.linear(&names::layer(l, rest), rows, cols);
        let kv = match layer.kv_source {
            Some(_) => None,
            None => Some(KvWeights {
                k_proj: linear("self_attn.k_proj", kv_width, hidden)?,
                v_proj: linear("self_attn.v_proj", kv_width, hidden)?,
                k_norm: vector("self_attn.k_norm.weight", layer.head_dim)?,
            }),
        };
        let ple = match config.ple_size {
            0 => None,
            ple => Some(PleWeights {
                gate: linear("per_layer_input_gate", ple, hidden)?,
                projection: linear("per_layer_projection", hidden, ple)?,
                post_norm: vector("post_per_layer_input_norm.weight", hidden)?,
            }),
        };
        let block = self.block(l, layer, hidden, config.num_attention_heads)?;
        Ok(LayerWeights { block, kv, ple })
    }
}

/// A tensor of bf16 or f32 as a matrix.
pub(crate) fn dense(tensor: Tensor, rows: usize, cols: usize) -> Result<Weights> {
    tensor.expect_shape(&[rows, cols])?;
    let data = match tensor.dtype {
        Dtype::BF16 => Data::Bf16(tensor.bytes.clone()),
        Dtype::F32 => Data::F32(tensor.bytes.clone()),
        _ => return Err(tensor.mismatch("BF16 or F32")),
    };
    Matrix::new(rows, cols, data).map_err(|e| tensor.mismatch(e.to_string()))
}

impl Loader<'_> {
    /// The error for two tensors that claim to be the same weight.
    pub(crate) fn inconsistent(&self, name: &str, reason: &str) -> Error {
        Error::Inconsistent {
            path: self.files.dir().to_path_buf(),
            tensor: self.files.full_name(name),
            reason: reason.into(),
        }
    }
}
