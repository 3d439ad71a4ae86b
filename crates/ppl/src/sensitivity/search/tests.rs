use super::*;

/// Costs that are known: each part alone, and pairs of removals together. Every linear has 100 bytes at 16 bits.
struct Landscape {
    alone: Vec<f64>,
    together: Vec<(usize, usize, f64)>,
    groups: BTreeMap<(Group, u8), f64>,
    /// What removing a layer adds to the price of narrow widths.
    strain: f64,
    asked: Vec<Variant>,
}

const KINDS: [Group; 3] = [Group::Kind("q"), Group::Kind("gate"), Group::Kind("down")];

impl Landscape {
    fn layers_only(alone: &[f64], together: &[(usize, usize, f64)]) -> Landscape {
        let (alone, together) = (alone.to_vec(), together.to_vec());
        Landscape { alone, together, groups: BTreeMap::new(), strain: 0.0, asked: Vec::new() }
    }

    fn space(&self) -> Space {
        let groups: BTreeSet<Group> = self.groups.keys().map(|(g, _)| *g).collect();
        let widths: BTreeSet<u8> = self.groups.keys().map(|(_, w)| *w).collect();
        Space {
            layers: (0..self.alone.len()).collect(),
            groups: groups.into_iter().collect(),
            widths: widths.into_iter().rev().collect(),
        }
    }

    fn cost(&self, v: &Variant) -> f64 {
        let layers: f64 = v.removed.iter().map(|&l| self.alone[l]).sum();
        let both = |a, b| v.removed.contains(&a) && v.removed.contains(&b);
        let pairs: f64 = self.together.iter().filter(|(a, b, _)| both(*a, *b)).map(|(_, _, c)| c).sum();
        let widths: f64 = v.widths.iter().map(|(&g, &w)| self.groups[&(g, w)]).sum();
        layers + pairs + widths * (1.0 + self.strain * v.removed.len() as f64)
    }

    /// Fewest bytes of all variants under the cap, by trying all of them.
    fn optimum(&self, cap: f64) -> u64 {
        let space = self.space();
        let mut all = vec![Variant::unchanged()];
        for &l in &space.layers {
            all.extend(all.iter().map(|v| v.without(l)).collect::<Vec<_>>());
        }
        for &g in &space.groups {
            let wide = all.clone();
            for &w in &space.widths {
                all.extend(wide.iter().map(|v| v.with(g, Some(w))));
            }
        }
        let under = all.iter().filter(|v| self.removable(&v.removed) && self.cost(v) <= cap.ln());
        under.map(|v| self.bytes(v)).min().unwrap()
    }
}

impl Evaluate for Landscape {
    /// The last layer stays.
    fn removable(&self, layers: &BTreeSet<usize>) -> bool {
        !layers.contains(&(self.alone.len() - 1))
    }

    fn bytes(&self, v: &Variant) -> u64 {
        let layer: u64 = KINDS.iter().map(|g| 100 * u64::from(v.width(*g).unwrap_or(16)) / 16).sum();
        (self.alone.len() - v.removed.len()) as u64 * layer
    }

    fn log_ratio(&mut self, v: &Variant) -> Result<f64> {
        assert!(!self.asked.contains(v), "{} was asked for twice", v.key());
        assert!(self.removable(&v.removed), "{} is no model", v.key());
        self.asked.push(v.clone());
        Ok(self.cost(v))
    }
}

fn run(landscape: &mut Landscape, evaluations: usize) -> Outcome {
    let space = landscape.space();
    let outcome = search(landscape, &space, &SearchOptions { evaluations, ..Default::default() }).unwrap();
    assert_eq!(outcome.evaluations, landscape.asked.len());
    assert!(outcome.evaluations <= evaluations);
    for plan in &outcome.plans {
        assert!(plan.log_ratio <= 1.05f64.ln() && plan.log_ratio == landscape.cost(&plan.variant));
        assert_eq!(plan.bytes, landscape.bytes(&plan.variant));
    }
    outcome
}

/// Layers 0 and 1 do each other's work: the two least sensitive, and the two that must not go together.
#[test]
fn a_plan_that_greed_cannot_see_is_found() {
    let alone = [0.010, 0.011, 0.015, 0.015, 0.016, 0.3, 0.3, 0.0];
    let mut landscape = Landscape::layers_only(&alone, &[(0, 1, 0.2), (2, 3, 0.03)]);
    let outcome = run(&mut landscape, 100);
    assert_eq!(outcome.least_sensitive.variant.key(), "-0", "one more is over the cap");
    assert_eq!(outcome.plans[0].variant.key(), "-0 -2 -4");
    assert_eq!(outcome.plans[0].bytes, landscape.optimum(1.05));
    assert!(!outcome.exhausted);
}

/// The pair costs less than either: by the sum of what its parts cost alone it would be far over the cap.
#[test]
fn what_helps_only_together_is_priced_where_it_is_held() {
    let alone = [0.03, 0.04, 0.02, 0.3, 0.3, 0.0];
    let mut landscape = Landscape::layers_only(&alone, &[(0, 1, -0.05), (0, 2, 0.1)]);
    let outcome = run(&mut landscape, 40);
    assert_eq!(outcome.least_sensitive.variant.key(), "-2");
    assert_eq!(outcome.plans[0].variant.key(), "-0 -1");
    assert_eq!(outcome.plans[0].bytes, landscape.optimum(1.05));
}

/// Numbers without pattern, the same in every run.
fn noise(seed: &mut u64) -> f64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 40) as f64 / (1u64 << 24) as f64
}

fn random(seed: u64) -> Landscape {
    let mut seed = seed;
    let mut next = || noise(&mut seed);
    let layers = 6;
    let alone = (0..layers).map(|_| 0.002 + 0.05 * next().powi(2)).collect();
    let mut together = Vec::new();
    for a in 0..layers {
        for b in a + 1..layers {
            together.push((a, b, 0.04 * (next() - 0.3)));
        }
    }
    let mut groups = BTreeMap::new();
    for g in KINDS {
        let size = 0.003 + 0.02 * next();
        for (w, factor) in [(8, 0.01), (4, 0.4), (3, 1.5), (2, 6.0)] {
            groups.insert((g, w), size * factor * (0.7 + 0.6 * next()));
        }
    }
    Landscape { alone, together, groups, strain: 0.1, asked: Vec::new() }
}

/// 8000 variants each, of which at most 250 are evaluated.
#[test]
fn random_landscapes_are_solved_or_nearly_so() {
    let (mut exact, mut better) = (0, 0);
    for seed in 0..30 {
        let mut landscape = random(seed);
        let outcome = run(&mut landscape, 250);
        let (found, optimum) = (outcome.plans[0].bytes, landscape.optimum(1.05));
        let uniform = outcome.least_sensitive.bytes;
        assert!(found <= uniform, "seed {seed}: {found}, the uniform plan {uniform}");
        assert!(found as f64 <= 1.25 * optimum as f64, "seed {seed}: {found}, the optimum {optimum}");
        exact += usize::from(found == optimum);
        better += usize::from(found < uniform);
    }
    assert!(exact >= 25, "only {exact} of 30 are the optimum");
    assert!(better >= 20, "only {better} of 30 beat the uniform plan");
}

#[test]
fn a_search_can_be_repeated() {
    let keys = |l: &mut Landscape| {
        run(l, 120);
        l.asked.iter().map(Variant::key).collect::<Vec<_>>()
    };
    assert_eq!(keys(&mut random(5)), keys(&mut random(5)));
}

#[test]
fn options_that_leave_nothing_are_refused() {
    let mut landscape = random(1);
    let space = landscape.space();
    let mut message = |options: SearchOptions| search(&mut landscape, &space, &options).unwrap_err().to_string();
    for cap in [1.0, 0.5, f64::NAN, f64::INFINITY] {
        assert!(message(SearchOptions { cap, ..Default::default() }).contains("a number above 1"), "{cap}");
    }
    assert!(message(SearchOptions { beam: 0, ..Default::default() }).contains("beam"));
    assert!(message(SearchOptions { evaluations: 17, ..Default::default() }).contains("more than 18"));
    let nothing = Space { layers: vec![5], groups: vec![], widths: vec![] };
    assert!(search(&mut landscape, &nothing, &SearchOptions::default()).unwrap_err().to_string().contains("none"));
}
