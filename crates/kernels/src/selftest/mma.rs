//! Is a row of a matrix product the same bits in every row slot and column slot, whatever stands beside it? Row invariance, and with it every
//! promise that speculative output equals plain output, rests on that, and no manual states it.

use half::{bf16, f16};

use super::{Check, Failure, Measurement, Subject, vectors::random, words, wrong};
use crate::device::{Argument, Launch};

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "mma f16",
        what: "a row or column of an f16 product has the same bits in every slot and company",
        timed: false,
        run: run::<F16>,
    },
    Check {
        name: "mma bf16",
        what: "a row or column of a bf16 product has the same bits in every slot and company",
        timed: false,
        run: run::<Bf16>,
    },
    Check {
        name: "mma s8",
        what: "a row or column of an int8 product is exact in every slot and company",
        timed: false,
        run: run::<S8>,
    },
];

/// Rows of the first operand, columns of the second.
const ROWS: usize = 16;
const COLUMNS: usize = 8;
/// Products added up in one tile.
const STEPS: usize = 8;
/// Different vectors under test, the last one of denormals.
const VECTORS: u32 = 4;

/// An operand type.
trait Operand {
    const KERNEL: &'static str;
    /// Inputs of one product.
    const INPUTS: usize;
    /// Elements of a register.
    const PACKED: usize;
    /// Bits of an element from random bits.
    fn element(random: u32, company: Company) -> u32;
    /// The number that the bits are.
    fn value(bits: u32) -> f64;
    /// Whether `found`, an element of the product, is the sum `expected`, where the terms' sizes add up to `size`.
    fn right(found: u32, expected: f64, size: f64) -> bool;
}

/// What the rest of a tile holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Company {
    Zeros,
    Ordinary,
    Denormal,
    Infinite,
    NotANumber,
}

const COMPANIES: [Company; 5] =
    [Company::Zeros, Company::Ordinary, Company::Denormal, Company::Infinite, Company::NotANumber];

struct F16;
struct Bf16;
struct S8;

/// From -2 to 2, never 0.
fn ordinary(random: u32) -> f32 {
    let size = 0.01 + (random >> 9) as f32 / (1 << 23) as f32 * 1.99;
    if random & 1 == 0 { size } else { -size }
}

impl Operand for F16 {
    const KERNEL: &'static str = "probe_mma_f16";
    const INPUTS: usize = 16;
    const PACKED: usize = 2;

    fn element(random: u32, company: Company) -> u32 {
        let sign = (random & 1) << 15;
        match company {
            Company::Zeros => 0,
            Company::Ordinary => f16::from_f32(ordinary(random)).to_bits().into(),
            Company::Denormal => sign | (random >> 8 & 0x3ff).max(1),
            Company::Infinite => sign | 0x7c00,
            Company::NotANumber => sign | 0x7c01 | random >> 8 & 0x3ff,
        }
    }

    fn value(bits: u32) -> f64 {
        f16::from_bits(bits as u16).into()
    }

    fn right(found: u32, expected: f64, size: f64) -> bool {
        close(found, expected, size)
    }
}

impl Operand for Bf16 {
    const KERNEL: &'static str = "probe_mma_bf16";
    const INPUTS: usize = 16;
    const PACKED: usize = 2;

    fn element(random: u32, company: Company) -> u32 {
        let sign = (random & 1) << 15;
        match company {
            Company::Zeros => 0,
            Company::Ordinary => bf16::from_f32(ordinary(random)).to_bits().into(),
            Company::Denormal => sign | (random >> 8 & 0x7f).max(1),
            Company::Infinite => sign | 0x7f80,
            Company::NotANumber => sign | 0x7f81 | random >> 8 & 0x7f,
        }
    }

    fn value(bits: u32) -> f64 {
        bf16::from_bits(bits as u16).into()
    }

    fn right(found: u32, expected: f64, size: f64) -> bool {
        close(found, expected, size)
    }
}

impl Operand for S8 {
    const KERNEL: &'static str = "probe_mma_s8";
    const INPUTS: usize = 32;
    const PACKED: usize = 4;

    fn element(random: u32, company: Company) -> u32 {
        match company {
            Company::Zeros => 0,
            Company::Ordinary => random >> 16 & 0xff,
            // No bits of an integer are special; the ends of its range are the nearest to it.
            Company::Denormal => 1 + (random & 1) * 0xfe,
            Company::Infinite => 0x7f,
            Company::NotANumber => 0x80,
        }
    }

    fn value(bits: u32) -> f64 {
        f64::from(bits as u8 as i8)
    }

    fn right(found: u32, expected: f64, _size: f64) -> bool {
        f64::from(found as i32) == expected
    }
}

/// Tensor cores add in an order of their own and cut instead of rounding, some bits below the largest term; denormal terms may count as
/// zeros.
fn close(found: u32, expected: f64, size: f64) -> bool {
    let terms = (STEPS * 16) as f64;
    (f64::from(f32::from_bits(found)) - expected).abs() <= size * 2e-6 + terms * f64::from(f32::MIN_POSITIVE)
}

/// One tile: both operands, `[ROWS or COLUMNS, STEPS * INPUTS]` elements.
struct Tile {
    a: Vec<u32>,
    b: Vec<u32>,
}

/// Where the vectors under test stand in a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    vector: u32,
    row: usize,
    column: usize,
    company: Company,
}

fn tile<O: Operand>(place: Place) -> Tile {
    let inputs = STEPS * O::INPUTS;
    let Place { vector, row, column, company } = place;
    // The vector under test is the same wherever it stands; the company is another one at every place.
    let own = if vector + 1 == VECTORS { Company::Denormal } else { Company::Ordinary };
    let salt = 1000 + (row * COLUMNS + column) as u32;
    let operand = |slots: usize, mine: usize, seed: u32| -> Vec<u32> {
        let element = |i: usize| match i / inputs == mine {
            true => O::element(random(seed + vector, i % inputs), own),
            false => O::element(random(seed + salt, i), company),
        };
        (0..slots * inputs).map(element).collect()
    };
    // The column is ordinary beside a row of denormals, so that their product is not all zeros.
    let mut b = operand(COLUMNS, column, 200);
    for (i, element) in b[column * inputs..][..inputs].iter_mut().enumerate() {
        *element = O::element(random(200 + vector, i), Company::Ordinary);
    }
    Tile { a: operand(ROWS, row, 100), b }
}

/// A tile's operands in the order of the lanes' registers, as `mma.m16n8k16` and `m16n8k32` name them.
fn registers<O: Operand>(tile: &Tile, a: &mut Vec<u8>, b: &mut Vec<u8>) {
    let (inputs, width) = (STEPS * O::INPUTS, 32 / O::PACKED as u32);
    let mask = u32::MAX >> (32 - width);
    let pack = |operand: &[u32], slot: usize, first: usize| -> [u8; 4] {
        let parts = operand[slot * inputs + first..][..O::PACKED].iter().enumerate();
        parts.fold(0, |word, (i, bits)| word | (bits & mask) << (i as u32 * width)).to_le_bytes()
    };
    for step in 0..STEPS {
        for lane in 0..32 {
            let (g, first) = (lane / 4, step * O::INPUTS + lane % 4 * O::PACKED);
            for (slot, first) in
                [(g, first), (g + 8, first), (g, first + O::INPUTS / 2), (g + 8, first + O::INPUTS / 2)]
            {
                a.extend(pack(&tile.a, slot, first));
            }
            for first in [first, first + O::INPUTS / 2] {
                b.extend(pack(&tile.b, g, first));
            }
        }
    }
}

/// Every row slot and every column slot, in every company.
fn places() -> Vec<Place> {
    let mut places = Vec::new();
    for vector in 0..VECTORS {
        for company in COMPANIES {
            places.extend((0..ROWS).map(|row| Place { vector, row, column: row % COLUMNS, company }));
            places.extend((0..COLUMNS).map(|column| Place { vector, row: column * 5 % ROWS, column, company }));
        }
    }
    places
}

/// The first place whose product is not that of the same vectors elsewhere.
fn first_difference(places: &[Place], products: &[u32]) -> Option<String> {
    let first = |vector| places.iter().position(|p| p.vector == vector);
    places.iter().zip(products).find_map(|(place, &found)| {
        let reference = products[first(place.vector)?];
        (found != reference).then(|| format!("{place:?} gives {found:08x}, in other places {reference:08x}"))
    })
}

fn run<O: Operand>(subject: &Subject) -> Result<Vec<Measurement>, Failure> {
    let places = places();
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for &place in &places {
        registers::<O>(&tile::<O>(place), &mut a, &mut b);
    }
    let (a, b) = (subject.device.constant("a", &a)?, subject.device.constant("b", &b)?);
    let d = subject.device.allocate("d", places.len() * ROWS * COLUMNS * 4)?;
    let launch = Launch {
        kernel: O::KERNEL,
        grid: [places.len() as u32, 1, 1],
        block: 32,
        shared_bytes: 0,
        cooperative: false,
        arguments: vec![a.at(0), b.at(0), d.at(0), Argument::I32(STEPS as i32)],
    };
    // SAFETY: a tile a block: 32 lanes, four registers of a, two of b and four of d each.
    unsafe { subject.device.launch(&launch) }?;
    let d = words(&d)?;
    let products: Vec<u32> = places
        .iter()
        .enumerate()
        .map(|(i, place)| {
            let lane = place.row % 8 * 4 + place.column / 2;
            d[(i * 32 + lane) * 4 + place.row / 8 * 2 + place.column % 2]
        })
        .collect();
    for (place, &found) in places.iter().zip(&products) {
        let (tile, inputs) = (tile::<O>(*place), STEPS * O::INPUTS);
        let (row, column) = (&tile.a[place.row * inputs..][..inputs], &tile.b[place.column * inputs..][..inputs]);
        let terms = || row.iter().zip(column).map(|(&a, &b)| O::value(a) * O::value(b));
        let (expected, size) = (terms().sum(), terms().map(f64::abs).sum());
        if !O::right(found, expected, size) {
            return wrong(format!("{place:?}: the product is {found:08x}, which is not {expected:e}"));
        }
    }
    match first_difference(&places, &products) {
        Some(difference) => wrong(difference),
        None => Ok(Vec::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_in_every_company() {
        let places = places();
        for company in COMPANIES {
            let here = || places.iter().filter(|p| p.company == company);
            assert!((0..ROWS).all(|row| here().any(|p| p.row == row)));
            assert!((0..COLUMNS).all(|column| here().any(|p| p.column == column)));
        }
    }

    #[test]
    fn company_is_what_it_is_called() {
        for i in 0..100 {
            let of = |company| F16::value(F16::element(random(3, i), company));
            assert!(of(Company::NotANumber).is_nan() && of(Company::Infinite).is_infinite());
            assert!(of(Company::Denormal) != 0.0 && of(Company::Denormal).abs() < 2f64.powi(-14));
            let of = |company| Bf16::value(Bf16::element(random(3, i), company));
            assert!(of(Company::NotANumber).is_nan() && of(Company::Infinite).is_infinite());
            assert!(of(Company::Denormal) != 0.0 && of(Company::Denormal).abs() < f64::from(f32::MIN_POSITIVE));
        }
    }

    #[test]
    fn a_slot_with_other_bits_is_named() {
        let places = places();
        let mut products = vec![7; places.len()];
        assert_eq!(first_difference(&places, &products), None);
        products[50] = 8;
        let difference = first_difference(&places, &products).unwrap();
        assert!(difference.contains(&format!("{:?}", places[50])), "{difference}");
    }
}
