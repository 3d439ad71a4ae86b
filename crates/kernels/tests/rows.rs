//! `rows.cuh` on the emulator: what the formulas say, the same bits for a row in any company, and no races.

#![cfg(target_arch = "x86_64")]

use half::bf16;
use kernels::{
    device::{Buffer, Device, DeviceError, Emulation, Launch},
    step::{
        Own, Rows, StepError,
        kv::{KvCache, KvShape},
        rows::{
            AddNormed, Columns, Heads, NO_TOKEN, PerLayer, Rotations, Table, Tokens, combine_per_layer, embed, gated,
            norm,
        },
    },
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

const EPS: f32 = 1e-6;

fn device() -> Device {
    Device::emulated(Emulation { multiprocessors: 3, ..Emulation::default() }).unwrap()
}

fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..n).map(|_| random.random_range(-2.0f32..2.0)).collect()
}

fn floats(device: &Device, values: &[f32]) -> Buffer {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let buffer = device.allocate("floats", bytes.len()).unwrap();
    buffer.write(0, &bytes).unwrap();
    buffer
}

fn constant(device: &Device, values: &[f32]) -> Buffer {
    device.constant("weight", &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>()).unwrap()
}

/// A table of bf16, and what it holds.
fn table(device: &Device, vocabulary: usize, width: usize) -> (Table, Vec<f32>) {
    let values: Vec<bf16> = random(vocabulary * width, 7).into_iter().map(bf16::from_f32).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let buffer = device.constant("table", &bytes).unwrap();
    (Table { buffer, vocabulary, width }, values.iter().map(|v| v.to_f32()).collect())
}

fn read32(buffer: &Buffer) -> Vec<f32> {
    let mut bytes = vec![0; buffer.bytes()];
    buffer.read(0, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

fn read16(buffer: &Buffer, offset: usize, count: usize) -> Vec<f32> {
    let mut bytes = vec![0; count * 2];
    buffer.read(offset, &mut bytes).unwrap();
    bytes.as_chunks::<2>().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect()
}

fn run(device: &Device, launch: &Launch) -> Result<(), DeviceError> {
    // SAFETY: typed launches.
    unsafe { device.launch(launch) }
}

fn rms(x: &[f32], weight: Option<&[f32]>) -> Vec<f64> {
    let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
    let scale = (mean + f64::from(EPS)).sqrt().recip();
    x.iter().enumerate().map(|(i, &v)| f64::from(v) * scale * weight.map_or(1.0, |w| f64::from(w[i]))).collect()
}

/// Relative to what is expected, or to 1 where that is small.
fn assert_close(found: &[f32], expected: &[f64], most: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*f) - e).abs() / e.abs().max(1.0);
        assert!(error <= most, "{what}, element {i}: {f} for {e}");
    }
}

/// Half a unit in the last place of bf16, and a little for f32 sums.
const BF16: f64 = 0.0041;

#[test]
fn norms_are_those_of_the_formula_for_any_width() {
    let device = device();
    for width in [1, 16, 96, 257, 2560] {
        let (x, w) = (random(3 * width, 1), random(width, 2));
        let y = device.allocate("y", 3 * width * 2).unwrap();
        run(&device, &norm(&floats(&device, &x), &constant(&device, &w), &y, 3, width, EPS).unwrap()).unwrap();
        let expected: Vec<f64> = x.chunks_exact(width).flat_map(|row| rms(row, Some(&w))).collect();
        assert_close(&read16(&y, 0, 3 * width), &expected, BF16, "norm");
    }
}

#[test]
fn a_norm_has_the_same_bits_in_any_company() {
    let device = device();
    let width = 2560;
    let mut lanes_show = false;
    for seed in 0..24 {
        let x = random(16 * width, 3 + seed);
        // Results near the middle of two bf16 numbers: one bit of the row's scale decides where they go.
        let scale = rms(&x[..width], None)[0] / f64::from(x[0]);
        let w: Vec<f32> = x[..width].iter().map(|&v| (1.003_906_25 / (f64::from(v) * scale)) as f32).collect();
        let w = constant(&device, &w);
        let together = |rows: usize, kernel: &'static str| {
            let y = device.allocate("y", rows * width * 2).unwrap();
            let mut launch = norm(&floats(&device, &x[..rows * width]), &w, &y, rows, width, EPS).unwrap();
            launch.kernel = kernel;
            run(&device, &launch).map(|()| read16(&y, 0, width))
        };
        let alone = together(1, "rms_norm").unwrap();
        for rows in [2, 8, 16].into_iter().filter(|_| seed < 3) {
            assert!(together(rows, "rms_norm").unwrap() == alone, "{rows} rows");
        }
        // An assignment of lanes that follows the number of rows.
        let lanes = "norm_lanes_by_rows";
        lanes_show |= together(1, lanes).unwrap() != together(2, lanes).unwrap();
        if lanes_show && seed >= 3 {
            let error = together(2, "norm_no_barrier").unwrap_err().to_string();
            assert!(error.contains("RACE"), "{error}");
            return;
        }
    }
    panic!("no sum came out differently with other lanes");
}

#[test]
fn what_is_added_is_normed_and_the_next_product_reads_the_next_norm() {
    let device = device();
    let (rows, width) = (5, 200);
    let (added, x) = (random(rows * width, 1), random(rows * width, 2));
    let (w, v) = (random(width, 3), random(width, 4));
    for (next, scalar) in [(true, 1.0), (false, 0.75)] {
        let (stream, y) = (floats(&device, &x), device.allocate("y", rows * width * 2).unwrap());
        let (weight, follow) = (constant(&device, &w), constant(&device, &v));
        let launch = AddNormed {
            added: &floats(&device, &added),
            weight: &weight,
            x: &stream,
            scalar,
            next: next.then_some(&follow),
            y: &y,
            rows,
            width,
            eps: EPS,
        };
        run(&device, &launch.launch().unwrap()).unwrap();
        let normed = added.chunks_exact(width).flat_map(|row| rms(row, Some(&w)));
        let sum: Vec<f64> = x.iter().zip(normed).map(|(x, a)| (f64::from(*x) + a) * f64::from(scalar)).collect();
        let found = read32(&stream);
        assert_close(&found, &sum, 1e-5, "stream");
        let expected: Vec<f64> = found
            .chunks_exact(width)
            .flat_map(|row| if next { rms(row, Some(&v)) } else { row.iter().map(|&x| f64::from(x)).collect() })
            .collect();
        assert_close(&read16(&y, 0, rows * width), &expected, BF16, "y");
    }
}

#[test]
fn tokens_are_embedded_and_combined_with_their_per_layer_embeddings() {
    let device = device();
    let (hidden, layers, size, vocabulary) = (48, 3, 40, 20);
    let ids = [3, 19, 0, 7, NO_TOKEN];
    let tokens = Tokens::new(&device).unwrap();
    tokens.set(&ids).unwrap();
    let rows = ids.len();
    let row_of = |t: u32| if t == NO_TOKEN { 0 } else { t as usize };

    let (e, values) = table(&device, vocabulary, hidden);
    let (x, x16) =
        (device.allocate("x", rows * hidden * 4).unwrap(), device.allocate("x16", rows * hidden * 2).unwrap());
    run(&device, &embed(&e, &tokens, rows, &x, &x16).unwrap()).unwrap();
    let expected: Vec<f64> = ids
        .iter()
        .flat_map(|&t| &values[row_of(t) * hidden..][..hidden])
        .map(|&v| f64::from(v) * (hidden as f64).sqrt())
        .collect();
    assert_close(&read32(&x), &expected, 1e-6, "embedding");
    assert_close(&read16(&x16, 0, rows * hidden), &expected, 0.004, "embedding in bf16");

    let (per_layer, values) = table(&device, vocabulary, layers * size);
    let (projected, w) = (random(rows * layers * size, 5), random(size, 6));
    let ple = floats(&device, &projected);
    let weight = constant(&device, &w);
    let spec = PerLayer { table: &per_layer, layers, hidden, weight: &weight, eps: EPS };
    run(&device, &combine_per_layer(spec, &tokens, rows, &ple).unwrap()).unwrap();
    let mut expected = Vec::new();
    for (row, &t) in ids.iter().enumerate() {
        for layer in 0..layers {
            let context: Vec<f32> =
                projected[(row * layers + layer) * size..][..size].iter().map(|v| v / (hidden as f32).sqrt()).collect();
            let own = &values[(row_of(t) * layers + layer) * size..][..size];
            let normed = rms(&context, Some(&w));
            let sum = normed.iter().zip(own).map(|(c, t)| (c + f64::from(*t) * (size as f64).sqrt()) / 2f64.sqrt());
            expected.extend(sum);
        }
    }
    assert_close(&read32(&ple), &expected, 1e-5, "per-layer inputs");

    tokens.set(&[20]).unwrap();
    let error = run(&device, &embed(&e, &tokens, 1, &x, &x16).unwrap()).unwrap_err();
    assert!(error.to_string().contains("trap"), "a token beyond the vocabulary: {error}");
}

#[test]
fn products_are_gated_by_gelu() {
    let device = device();
    let (rows, width) = (3, 300);
    let both: Vec<f32> = random(rows * 2 * width, 8).iter().map(|v| v * 4.0).collect();
    let (buffer, y) = (floats(&device, &both), device.allocate("y", rows * width * 2).unwrap());
    let part = |column| Columns { buffer: &buffer, column, stride: 2 * width };
    run(&device, &gated(part(0), part(width), &y, rows, width).unwrap()).unwrap();
    let gelu = |z: f64| 0.5 * z * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (z + 0.044715 * z.powi(3))).tanh());
    let expected: Vec<f64> = (0..rows * width)
        .map(|i| (both[i / width * 2 * width + i % width], both[i / width * 2 * width + width + i % width]))
        .map(|(g, u)| gelu(f64::from(g)) * f64::from(u))
        .collect();
    assert_close(&read16(&y, 0, rows * width), &expected, 0.004, "gated");
    let beyond = Columns { buffer: &buffer, column: width + 1, stride: 2 * width };
    assert!(matches!(gated(part(0), beyond, &y, rows, width), Err(StepError::Shape { what: "last column", .. })));
}

/// Queries, keys and values of five rows, two of them branches: what arrives where, for a kind of rotary embedding.
fn check_heads(inverse_frequencies: &[f32], dim: usize, window: Option<usize>) {
    let device = device();
    let (heads, kv_heads, context) = (4, 2, 64);
    let kv = KvCache::new(&device, &[KvShape { kv_heads, head_dim: dim, window }], context).unwrap();
    kv.buffer().fill(0).unwrap();
    let layer = kv.layers()[0];
    let rotations = Rotations::new(&device, inverse_frequencies, context + 16).unwrap();
    let table = Rows::new(&device).unwrap();
    let places = [(61, Own::Cached), (62, Own::Cached), (63, Own::Cached), (62, Own::Side(1)), (63, Own::Side(14))];
    table.set(&places).unwrap();
    let rows = places.len();
    let of_row = (heads + 2 * kv_heads) * dim;
    let projected = random(rows * of_row, 9);
    let (qw, kw) = (random(dim, 10), random(dim, 11));
    let (query_weight, key_weight) = (constant(&device, &qw), constant(&device, &kw));
    let queries = device.allocate("q", rows * heads * dim * 2).unwrap();
    let buffer = floats(&device, &projected);
    let spec = Heads {
        projected: &buffer,
        query_weight: &query_weight,
        key_weight: Some(&key_weight),
        rotations: &rotations,
        heads,
        kv: &kv,
        layer: 0,
        table: &table,
        rows,
        queries: &queries,
        eps: EPS,
    };
    run(&device, &spec.launch().unwrap()).unwrap();

    let turned = |head: &[f64], position: usize| {
        let (low, high) = head.split_at(dim / 2);
        let angles: Vec<f64> = inverse_frequencies.iter().map(|f| f64::from(position as f32 * f)).collect();
        let mut out: Vec<f64> = (0..dim / 2).map(|m| low[m] * angles[m].cos() - high[m] * angles[m].sin()).collect();
        out.extend((0..dim / 2).map(|m| high[m] * angles[m].cos() + low[m] * angles[m].sin()));
        out
    };
    for (row, &(position, own)) in places.iter().enumerate() {
        let head = |h: usize| &projected[row * of_row + h * dim..][..dim];
        for h in 0..heads {
            let expected = turned(&rms(head(h), Some(&qw)), position);
            assert_close(&read16(&queries, (row * heads + h) * dim * 2, dim), &expected, 0.006, "query");
        }
        let (place, part) = match own {
            Own::Side(slot) => (slot, 2),
            _ => (position % layer.capacity, 0),
        };
        for h in 0..kv_heads {
            let at = |part: usize| layer.offsets[part] + (place * kv_heads + h) * dim * 2;
            let key = turned(&rms(head(heads + h), Some(&kw)), position);
            assert_close(&read16(kv.buffer(), at(part), dim), &key, 0.006, "key");
            let value = rms(head(heads + kv_heads + h), None);
            assert_close(&read16(kv.buffer(), at(part + 1), dim), &value, 0.004, "value");
        }
    }
    let written: usize = kv.buffer().traffic().unwrap().written as usize;
    assert_eq!(written, rows * 2 * kv_heads * dim * 2, "each row's key and value is written once, and nothing else");

    // Without keys of its own a layer finishes queries only.
    let only = floats(&device, &projected[..heads * dim]);
    run(&device, &Heads { projected: &only, key_weight: None, rows: 1, ..spec }.launch().unwrap()).unwrap();
    assert_eq!(kv.buffer().traffic().unwrap().written, 0);
    // A position that the rotations do not reach ends the launch.
    table.set(&[(context + 16, Own::Cached)]).unwrap();
    let error = run(&device, &Heads { rows: 1, ..spec }.launch().unwrap()).unwrap_err();
    assert!(error.to_string().contains("trap"), "{error}");
}

#[test]
fn heads_turn_wholly_in_sliding_layers_and_in_part_in_full_ones() {
    for dim in [16, 48, 256] {
        let all: Vec<f32> = (0..dim / 2).map(|m| 1e4f64.powf(-2.0 * m as f64 / dim as f64) as f32).collect();
        check_heads(&all, dim, Some(20));
        let quarter = |m: usize| if m < dim / 8 { 1e6f64.powf(-2.0 * m as f64 / dim as f64) as f32 } else { 0.0 };
        check_heads(&(0..dim / 2).map(quarter).collect::<Vec<_>>(), dim, None);
    }
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let device = device();
    let (x, w) = (floats(&device, &random(64, 1)), constant(&device, &random(16, 2)));
    let y = device.allocate("y", 64 * 2).unwrap();
    assert!(norm(&x, &w, &y, 4, 16, EPS).is_ok());
    assert!(matches!(norm(&x, &w, &y, 5, 16, EPS), Err(StepError::Short { .. })));
    assert!(matches!(norm(&x, &w, &y, 17, 1, EPS), Err(StepError::Shape { what: "rows", .. })));
    assert!(matches!(norm(&x, &w, &y, 1, 20_000, EPS), Err(StepError::Shape { what: "width of a row", .. })));
    let tokens = Tokens::new(&device).unwrap();
    assert!(tokens.set(&[0; 17]).is_err());
    let (e, _) = table(&device, 4, 16);
    assert!(matches!(embed(&e, &tokens, 5, &x, &y), Err(StepError::Short { .. })));
    let short = Table { vocabulary: 5, ..e };
    assert!(matches!(embed(&short, &tokens, 1, &x, &y), Err(StepError::Short { .. })));
}
