//! `cargo bench -p kernels --bench matmul`: one E4B matrix product on one thread, at every number of rows and in every format.
//!
//! The minimum over the rounds is the figure to compare while writing a kernel: other work on the machine only ever adds time.

use std::hint::black_box;
use std::time::Instant;

use kernels::cpu::{Data, Isa, Matrix, matmul};
use kernels::packing::Bits;

/// Timed repetitions; the widths take turns in each.
const ROUNDS: usize = 9;
const WIDTHS: [usize; 6] = [1, 2, 4, 8, 16, 64];

fn main() {
    println!(
        "{:>26} {:>6} {:>14} {:>4} {:>10} {:>10} {:>12} {:>9}",
        "isa", "format", "shape", "M", "min ms", "median", "GFMA/s (min)", "of M = 1"
    );
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool of one thread");
    pool.install(|| {
        // The MLP of E4B in both directions: k = 2560 fits the L1 cache for a few rows, k = 10240 does not.
        for (rows, cols) in [(10240, 2560), (2560, 10240)] {
            for isa in [Isa::best(), Isa::best().with_int8_activations(), Isa::portable()] {
                let scales = half::bf16::from_f32(0.01).to_le_bytes().repeat(rows * cols / 128);
                for bits in Bits::ALL {
                    let bytes = rows * bits.words(cols) * 4;
                    let packed: Vec<u8> = (0..bytes).map(|i| ((i * 2_654_435_761) >> 7) as u8).collect();
                    let data = Data::Packed { bits, packed: &packed[..], scales: &scales[..], group: 128 };
                    measure(isa, &bits.to_string(), &Matrix::new(rows, cols, data).expect("it fits"));
                }
                let bf16 = half::bf16::from_f32(0.01).to_le_bytes().repeat(rows * cols);
                measure(isa, "bf16", &Matrix::new(rows, cols, Data::Bf16(&bf16[..])).expect("it fits"));
            }
        }
    });
}

fn measure(isa: Isa, format: &str, w: &Matrix<&[u8]>) {
    let mut samples = vec![Vec::new(); WIDTHS.len()];
    for round in 0..=ROUNDS {
        for (samples, m) in samples.iter_mut().zip(WIDTHS) {
            if m > 16 && round > 2 {
                continue;
            }
            let x: Vec<f32> = (0..m * w.cols()).map(|i| (i % 17) as f32 - 8.0).collect();
            let mut y = vec![0.0; m * w.rows()];
            let started = Instant::now();
            matmul(isa, w, &x, &mut y);
            let elapsed = started.elapsed().as_secs_f64();
            black_box(&y);
            if round > 0 {
                samples.push(elapsed);
            }
        }
    }
    let mut first = None;
    for (mut samples, m) in samples.into_iter().zip(WIDTHS) {
        samples.sort_by(f64::total_cmp);
        let (min, median) = (samples[0], samples[samples.len() / 2]);
        let one = *first.get_or_insert(min);
        let rate = (m * w.rows() * w.cols()) as f64 / min / 1e9;
        let shape = format!("{}x{}", w.rows(), w.cols());
        println!(
            "{:>26} {format:>6} {shape:>14} {m:>4} {:>10.2} {:>10.2} {rate:>12.2} {:>9.2}",
            isa.name(),
            min * 1e3,
            median * 1e3,
            min / one
        );
    }
}
