//! What a step does with rows between matrix products, on a device as on the emulator: what the formulas say, and the same bits for a row
//! in any company.

use super::{
    Check, Failure, Measurement, Subject,
    cases::{
        bits16, bytes16, bytes32, floats, gelu, numbers, numbers16, read16, read32, rms,
        rows::{EPS, HeadCase, NORM_SEEDS, normed, on_edges, wide},
        weights32, words,
    },
    wrong,
};
use crate::{
    device::{Buffer, Launch},
    step::{
        MOST_ROWS, Own,
        kv::KvStorage,
        rows::{AddNormed, Columns, NO_TOKEN, PerLayer, Table, Tokens, combine_per_layer, embed, gated, norm},
    },
};

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "rows norms",
        what: "norms and sums with the residual stream are those of f64, rounded once",
        timed: false,
        run: norms,
    },
    Check {
        name: "rows embeddings",
        what: "embeddings of tokens and of layers are those of f64",
        timed: false,
        run: embeddings,
    },
    Check { name: "rows gated", what: "gated products are those of f64, rounded once", timed: false, run: products },
    Check {
        name: "rows heads",
        what: "normed and turned heads are those of f64; keys and values go to their places and nowhere else",
        timed: false,
        run: heads,
    },
    Check {
        name: "rows bits",
        what: "a row has the bits that it has alone, in any order, on every run",
        timed: false,
        run: bits,
    },
];

/// Half a unit in the last place of bf16, and a little for f32 sums.
const ROUNDED: f64 = 0.0041;
/// The same where queries and keys were turned by rounded sines.
const TURNED: f64 = 0.006;
/// f32 sums.
const SINGLE: f64 = 1e-5;

fn run(subject: &Subject, launch: &Launch) -> Result<(), Failure> {
    // SAFETY: typed launches, whose buffers were checked when they were made.
    Ok(unsafe { subject.device.launch(launch) }?)
}

/// Relative to what is expected, or to 1 where that is small.
fn close(found: &[f32], expected: &[f64], most: f64, what: &str) -> Result<(), Failure> {
    if found.len() != expected.len() {
        return wrong(format!("{what}: {} numbers for {}", found.len(), expected.len()));
    }
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*f) - e).abs() / e.abs().max(1.0);
        if error.is_nan() || error > most {
            return wrong(format!("{what}: element {i} is {f}, in f64 {e}"));
        }
    }
    Ok(())
}

/// A table of bf16, and what it holds.
fn table(subject: &Subject, vocabulary: usize, width: usize) -> Result<(Table, Vec<f32>), Failure> {
    let values = numbers16(7, vocabulary * width, 2.0);
    let buffer = subject.device.constant("table", &bytes16(&values))?;
    Ok((Table { buffer, vocabulary, width }, values.iter().map(|v| v.to_f32()).collect()))
}

fn norms(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let device = &subject.device;
    for width in [1, 16, 96, 257, 2560] {
        let (x, w) = (numbers(1, 3 * width, 2.0), numbers(2, width, 2.0));
        let y = device.allocate("y", 3 * width * 2)?;
        run(subject, &norm(&floats(device, &x)?, &weights32(device, &w)?, &y, 3, width, EPS)?)?;
        close(&read16(&y, 0, 3 * width)?, &normed(&x, Some(&w), width), ROUNDED, "norm")?;
    }
    for (width, with_next, scalar) in [(200, true, 1.0), (200, false, 0.75), (2560, true, 1.25)] {
        let rows = 5;
        let (added, x) = (numbers(1, rows * width, 2.0), numbers(2, rows * width, 2.0));
        let (w, v) = (numbers(3, width, 2.0), numbers(4, width, 2.0));
        let (stream, y) = (floats(device, &x)?, device.allocate("y", rows * width * 2)?);
        let next = weights32(device, &v)?;
        let launch = AddNormed {
            added: &floats(device, &added)?,
            weight: &weights32(device, &w)?,
            x: &stream,
            scalar,
            next: with_next.then_some(&next),
            y: &y,
            rows,
            width,
            eps: EPS,
        };
        run(subject, &launch.launch()?)?;
        let sums = x.iter().zip(normed(&added, Some(&w), width));
        let sums: Vec<f64> = sums.map(|(x, a)| (f64::from(*x) + a) * f64::from(scalar)).collect();
        let found = read32(&stream)?;
        close(&found, &sums, SINGLE, "residual stream")?;
        let expected = if with_next { normed(&found, Some(&v), width) } else { wide(&found) };
        close(&read16(&y, 0, rows * width)?, &expected, ROUNDED, "norm of the residual stream")?;
    }
    Ok(Vec::new())
}

fn embeddings(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let device = &subject.device;
    let (hidden, layers, size, vocabulary) = (48, 3, 40, 20);
    let of = [3, 19, 0, 7, NO_TOKEN];
    let tokens = Tokens::new(device)?;
    tokens.set(&of)?;
    let rows = of.len();
    let row_of = |t: u32| if t == NO_TOKEN { 0 } else { t as usize };

    let (own, values) = table(subject, vocabulary, hidden)?;
    let (x, x16) = (device.allocate("x", rows * hidden * 4)?, device.allocate("x16", rows * hidden * 2)?);
    run(subject, &embed(&own, &tokens, rows, &x, &x16)?)?;
    let embedded = of.iter().flat_map(|&t| &values[row_of(t) * hidden..][..hidden]);
    let expected: Vec<f64> = embedded.map(|&v| f64::from(v) * (hidden as f64).sqrt()).collect();
    close(&read32(&x)?, &expected, 1e-6, "embedding")?;
    close(&read16(&x16, 0, rows * hidden)?, &expected, ROUNDED, "embedding in bf16")?;

    let (per_layer, values) = table(subject, vocabulary, layers * size)?;
    let (projected, w) = (numbers(5, rows * layers * size, 2.0), numbers(6, size, 2.0));
    let ple = floats(device, &projected)?;
    let weight = weights32(device, &w)?;
    let spec = PerLayer { table: &per_layer, layers, hidden, weight: &weight, eps: EPS };
    run(subject, &combine_per_layer(spec, &tokens, rows, &ple)?)?;
    let mut expected = Vec::new();
    for (row, &t) in of.iter().enumerate() {
        for layer in 0..layers {
            let context = &projected[(row * layers + layer) * size..][..size];
            let context: Vec<f64> = context.iter().map(|v| f64::from(*v) / (hidden as f64).sqrt()).collect();
            let own = &values[(row_of(t) * layers + layer) * size..][..size];
            let both = rms(&context, Some(&w), EPS).into_iter().zip(own);
            expected.extend(both.map(|(c, t)| (c + f64::from(*t) * (size as f64).sqrt()) / 2f64.sqrt()));
        }
    }
    close(&read32(&ple)?, &expected, SINGLE, "per-layer inputs")?;
    Ok(Vec::new())
}

fn products(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let device = &subject.device;
    let (rows, width) = (3, 300);
    let both = numbers(8, rows * 2 * width, 8.0);
    let (buffer, y) = (floats(device, &both)?, device.allocate("y", rows * width * 2)?);
    let part = |column| Columns { buffer: &buffer, column, stride: 2 * width };
    run(subject, &gated(part(0), part(width), &y, rows, width)?)?;
    let of_row = |row: &[f32]| -> Vec<f64> {
        row[..width].iter().zip(&row[width..]).map(|(g, u)| gelu(f64::from(*g)) * f64::from(*u)).collect()
    };
    let expected: Vec<f64> = both.chunks_exact(2 * width).flat_map(of_row).collect();
    close(&read16(&y, 0, rows * width)?, &expected, ROUNDED, "gated product")?;
    Ok(Vec::new())
}

fn heads(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let (bf16, int8) = (KvStorage::Bf16, KvStorage::Int8);
    for (dim, window, storage) in [
        (16, Some(20), bf16),
        (48, None, bf16),
        (256, Some(20), bf16),
        (512, None, bf16),
        (48, Some(20), int8),
        (512, None, int8),
    ] {
        let case = HeadCase::new(&subject.device, dim, window, storage)?;
        let layer = case.kv.layers()[0];
        let places = HeadCase::PLACES;
        case.table.set(&places)?;
        run(subject, &case.launch(places.len(), true)?)?;
        let (heads, kv_heads) = (HeadCase::HEADS, HeadCase::KV_HEADS);
        let mut written = vec![false; case.kv.buffer().bytes()];
        for (row, &place) in places.iter().enumerate() {
            let head = |h: usize| wide(&case.projected[(row * (heads + 2 * kv_heads) + h) * dim..][..dim]);
            let with = |h: usize, weight: &[f32]| case.turned(&rms(&head(h), Some(weight), EPS), place.0);
            for h in 0..heads {
                let found = read16(&case.queries, (row * heads + h) * dim * 2, dim)?;
                close(&found, &with(h, &case.weights[0]), TURNED, "query")?;
            }
            // Of int8, half a step of 1/127 of the head's largest component, and its rounding to bf16.
            let rounded = |exact: &[f64], bf16: f64| match storage {
                KvStorage::Bf16 => bf16,
                KvStorage::Int8 => bf16 + exact.iter().fold(0.0f64, |most, v| most.max(v.abs())) * 0.51 / 127.0,
            };
            for (part, at) in case.places(place).into_iter().enumerate() {
                let mut bytes = vec![0; layer.position_bytes()];
                case.kv.buffer().read(at, &mut bytes)?;
                written[at..at + bytes.len()].fill(true);
                for (h, found) in layer.decode(&bytes).chunks_exact(dim).enumerate() {
                    let (what, exact, error) = match part {
                        0 => ("key", with(heads + h, &case.weights[1]), TURNED),
                        _ => ("value", rms(&head(heads + kv_heads + h), None, EPS), ROUNDED),
                    };
                    close(found, &exact, rounded(&exact, error), what)?;
                }
            }
        }
        let mut all = vec![0; written.len()];
        case.kv.buffer().read(0, &mut all)?;
        if let Some(at) = all.iter().zip(&written).position(|(&byte, &written)| byte != 0 && !written) {
            return wrong(format!(
                "heads of {dim}: byte {at} of the cache is written, where no row's key or value belongs"
            ));
        }
        // Without keys of its own a layer finishes queries only: one row's, since the projections are as many fewer.
        case.kv.buffer().fill(0)?;
        run(subject, &case.launch(1, false)?)?;
        if words(case.kv.buffer())?.iter().any(|&word| word != 0) {
            return wrong(format!("heads of {dim}: a layer without keys of its own writes some"));
        }
        not_numbers(subject, case)?;
    }
    Ok(Vec::new())
}

/// What went wrong in a key or a value must be seen by who reads it; an int8 can't be NaN, but its head's scale can.
fn not_numbers(subject: &Subject, mut case: HeadCase) -> Result<(), Failure> {
    let layer = case.kv.layers()[0];
    let (dim, storage) = (layer.shape.head_dim, layer.storage);
    let (key, value) = (HeadCase::HEADS, HeadCase::HEADS + HeadCase::KV_HEADS + 1);
    case.projected[key * dim + dim - 1] = f32::NAN;
    case.projected[value * dim] = f32::INFINITY;
    case.buffer = floats(&subject.device, &case.projected)?;
    run(subject, &case.launch(1, true)?)?;
    for (at, spoilt) in case.places(HeadCase::PLACES[0]).into_iter().zip([0, 1]) {
        let mut bytes = vec![0; layer.position_bytes()];
        case.kv.buffer().read(at, &mut bytes)?;
        for (h, head) in layer.decode(&bytes).chunks_exact(dim).enumerate() {
            if head.iter().any(|v| v.is_nan()) != (h == spoilt) {
                return wrong(format!(
                    "heads of {dim}, {storage:?}: a component that is no number is lost, or spoils another head"
                ));
            }
        }
    }
    Ok(())
}

/// A launch of `rows` rows by their numbers, and what it makes of each, as bits.
type OfRows<'a> = dyn Fn(&[usize]) -> Result<Vec<Vec<u16>>, Failure> + 'a;

/// Every row alone, then in companies and orders.
fn same(subject: &Subject, what: &str, of_rows: &OfRows<'_>) -> Result<(), Failure> {
    let order = [11, 3, 7, 0, 14, 9, 5, 1, 15, 2, 8, 13, 4, 12, 6, 10];
    let alone: Vec<Vec<u16>> =
        (0..MOST_ROWS).map(|row| Ok(of_rows(&[row])?.remove(0))).collect::<Result<_, Failure>>()?;
    let mut companies: Vec<&[usize]> = [2, 7, 8, 9, 16].map(|m| &order[..m]).to_vec();
    companies.extend(std::iter::repeat_n(&order[..], subject.size(100, 0)));
    for company in companies {
        for (&row, found) in company.iter().zip(of_rows(company)?) {
            if found != alone[row] {
                return wrong(format!("{what}: row {row} has other bits among {} than alone", company.len()));
            }
        }
    }
    Ok(())
}

/// Rows of a matrix, by their numbers.
fn gathered(x: &[f32], width: usize, rows: &[usize]) -> Vec<f32> {
    rows.iter().flat_map(|&row| &x[row * width..][..width]).copied().collect()
}

/// bf16 results of rows.
fn split(y: &Buffer, width: usize, rows: usize) -> Result<Vec<Vec<u16>>, Failure> {
    Ok(bits16(y, 0, rows * width)?.chunks_exact(width).map(<[u16]>::to_vec).collect())
}

fn bits(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let device = &subject.device;
    let width = 2560;
    for seed in NORM_SEEDS {
        let (x, w) = on_edges(seed, width);
        let weight = weights32(device, &w)?;
        let of_rows = |rows: &[usize]| {
            let (x, y) = (floats(device, &gathered(&x, width, rows))?, device.allocate("y", rows.len() * width * 2)?);
            run(subject, &norm(&x, &weight, &y, rows.len(), width, EPS)?)?;
            split(&y, width, rows.len())
        };
        if seed == NORM_SEEDS.start || !subject.properties.emulated {
            same(subject, "norm", &of_rows)?;
        } else if of_rows(&[0])?[0] != of_rows(&[0, 1])?[0] {
            return wrong("norm: row 0 has other bits beside another one than alone");
        }
    }
    let width = 200;
    let (added, x) = (numbers(1, MOST_ROWS * width, 2.0), numbers(2, MOST_ROWS * width, 2.0));
    let (w, v) = (weights32(device, &numbers(3, width, 2.0))?, weights32(device, &numbers(4, width, 2.0))?);
    let add_normed = |rows: &[usize]| {
        let (added, x) = (floats(device, &gathered(&added, width, rows))?, floats(device, &gathered(&x, width, rows))?);
        let y = device.allocate("y", rows.len() * width * 2)?;
        let (added, weight, next) = (&added, &w, Some(&v));
        let launch = AddNormed { added, weight, x: &x, scalar: 0.75, next, y: &y, rows: rows.len(), width, eps: EPS };
        run(subject, &launch.launch()?)?;
        let mut out = split(&y, width, rows.len())?;
        for (out, stream) in out.iter_mut().zip(split(&x, 2 * width, rows.len())?) {
            out.extend(stream);
        }
        Ok(out)
    };
    same(subject, "residual stream", &add_normed)?;
    let product = |rows: &[usize]| {
        let (x, y) = (floats(device, &gathered(&x, width, rows))?, device.allocate("y", rows.len() * width)?);
        let part = |column| Columns { buffer: &x, column, stride: width };
        run(subject, &gated(part(0), part(width / 2), &y, rows.len(), width / 2)?)?;
        split(&y, width / 2, rows.len())
    };
    same(subject, "gated product", &product)?;
    let tokens = Tokens::new(device)?;
    let (own, _) = table(subject, MOST_ROWS, 48)?;
    let embedding = |rows: &[usize]| {
        tokens.set(&rows.iter().map(|&r| r as u32).collect::<Vec<_>>())?;
        let (x, x16) = (device.allocate("x", rows.len() * 48 * 4)?, device.allocate("x16", rows.len() * 48 * 2)?);
        run(subject, &embed(&own, &tokens, rows.len(), &x, &x16)?)?;
        split(&x16, 48, rows.len())
    };
    same(subject, "embedding", &embedding)?;
    let case = HeadCase::new(&subject.device, 48, Some(20), KvStorage::Bf16)?;
    let width = HeadCase::of_row(48);
    let finished = |rows: &[usize]| {
        case.buffer.write(0, &bytes32(&gathered(&case.projected, width, rows)))?;
        case.table.set(&rows.iter().map(|&r| (40 + r, Own::Cached)).collect::<Vec<_>>())?;
        run(subject, &case.launch(rows.len(), true)?)?;
        let mut out = split(&case.queries, HeadCase::HEADS * 48, rows.len())?;
        for (out, &row) in out.iter_mut().zip(rows) {
            for at in case.places((40 + row, Own::Cached)) {
                out.extend(bits16(case.kv.buffer(), at, HeadCase::KV_HEADS * 48)?);
            }
        }
        Ok(out)
    };
    same(subject, "heads", &finished).map(|()| Vec::new())
}
