//! Products of int8 weights with int8 inputs: exact, so that every device gives the bits of plain integers.

use super::{
    Check, Failure, Measurement, Subject,
    cases::dot::{Case, ROWS},
    wrong,
};

pub(super) const CHECKS: &[Check] = &[Check {
    name: "gemm integers",
    what: "int8 weights with int8 inputs give the bits of plain integers, at any number of rows, on every run",
    timed: false,
    run: integers,
}];

/// Channels and inputs: padding in both directions, one segment and several.
pub(super) const SHAPES: [(usize, usize); 5] = [(64, 256), (16, 16), (80, 1040), (128, 2560), (208, 784)];

fn integers(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let larger = [(2560, 2560), (2560, 10_240)];
    for &(n, k) in SHAPES.iter().chain(&larger[..subject.size(larger.len(), 0)]) {
        let case = Case::new(&subject.device, n, k, None)?;
        let expected: Vec<Vec<u32>> = (0..ROWS).map(|row| case.reference(row)).collect();
        let mut counts = vec![1, 8, 9, 16, 17, ROWS];
        counts.extend(std::iter::repeat_n(16, subject.size(100, 0)));
        for m in counts {
            // From the last row on, so that a row has another place at every count.
            let rows: Vec<usize> = (0..m).map(|i| (ROWS - 1 + i) % ROWS).collect();
            for (found, &row) in case.run(&rows)?.chunks_exact(n).zip(&rows) {
                if found != expected[row] {
                    return wrong(format!("[{n}, {k}], {m} rows: row {row} is not the product of integers"));
                }
            }
        }
    }
    // One bit of one weight shows in its channel and in no other.
    let (n, k) = (80, 1040);
    let good = Case::new(&subject.device, n, k, None)?.run(&[3])?;
    let flipped = Case::new(&subject.device, n, k, Some(17 * k / 4 + 100))?.run(&[3])?;
    let changed: Vec<usize> = (0..n).filter(|&i| good[i] != flipped[i]).collect();
    if changed != [17] {
        return wrong(format!("a flipped bit in a weight of channel 17 shows in channels {changed:?}"));
    }
    Ok(Vec::new())
}
