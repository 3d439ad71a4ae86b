use proptest::prelude::*;

use super::*;

#[test]
fn shapes_keep_their_limits() {
    assert_eq!(Shape::chain(7).unwrap().rows(), 8);
    assert_eq!(Shape::star(vec![1, 1, 1, 1, 0, 0, 0]).unwrap().rows(), 12);
    assert_eq!(Shape::star(vec![2, 1, 0]).unwrap().limited(2).to_string(), "2,1");
    assert!(Shape::chain(15).is_ok());
    for (shape, limit) in [(vec![0; 16], 15), (vec![5], 4), (vec![4, 4, 4, 0], 16)] {
        let message = Shape::star(shape).unwrap_err().to_string();
        assert!(message.contains(&limit.to_string()), "{message}");
    }
}

#[test]
fn only_branches_of_the_first_rejected_depth_count() {
    let main = [10, 20, 30];
    let branches = [Branch { depth: 1, token: 11 }, Branch { depth: 2, token: 21 }, Branch { depth: 2, token: 21 }];
    // Everything accepted: no branch, the bonus of the last main row.
    let all = accept(&main, &branches, &[10, 20, 30, 40, 0, 0, 0]);
    assert_eq!(all, Outcome { main: 3, branch: None, emitted: vec![10, 20, 30, 40], last_row: 3 });
    // Depth 2 rejected, and the branch there holds the choice: the lowest of two equal rows.
    let salvaged = accept(&main, &branches, &[10, 21, 30, 40, 0, 77, 88]);
    assert_eq!(salvaged, Outcome { main: 1, branch: Some(1), emitted: vec![10, 21, 77], last_row: 5 });
    // Depth 1 rejected: a branch right behind it at depth 2 is refused, though it holds what the target says there.
    let refused = accept(&main, &branches, &[12, 21, 30, 40, 0, 77, 88]);
    assert_eq!(refused, Outcome { main: 0, branch: None, emitted: vec![12], last_row: 0 });
    assert_eq!(accept(&[], &[], &[5]), Outcome { main: 0, branch: None, emitted: vec![5], last_row: 0 });
}

#[test]
fn output_is_cut_at_stop_tokens_and_at_the_limit() {
    assert_eq!(cut(&[1, 2, 3], &[2], 9), 2);
    assert_eq!(cut(&[1, 2, 3], &[9], 9), 3);
    assert_eq!(cut(&[1, 2, 3], &[3], 1), 1);
    assert_eq!(cut(&[1, 2, 3], &[1], 2), 1);
}

/// A target that is a function of the whole sequence so far.
fn target(sequence: &[u32], vocab: u32, seed: u32) -> u32 {
    let tail = sequence.iter().rev().take(3).fold(seed, |h, t| h.wrapping_mul(31).wrapping_add(t + 7));
    (tail ^ tail >> 7) % vocab
}

/// Twenty lines that decode plainly.
fn plain(prompt: &[u32], count: usize, vocab: u32, seed: u32) -> Vec<u32> {
    let mut sequence = prompt.to_vec();
    while sequence.len() < prompt.len() + count {
        sequence.push(target(&sequence, vocab, seed));
    }
    sequence[prompt.len()..].to_vec()
}

proptest! {
    /// Whatever is drafted, what comes out is what plain decoding says, and each step yields between 1 and K + 1 tokens.
    #[test]
    fn any_draft_gives_the_plain_output(
        prompt in prop::collection::vec(0u32..4, 1..6), seed: u32, vocab in 2u32..5,
        drafts in prop::collection::vec(prop::collection::vec((0u32..5, 0usize..3, 0u32..5), 0..6), 12),
    ) {
        let mut sequence = prompt.clone();
        for step in &drafts {
            let main: Vec<u32> = step.iter().map(|d| d.0).collect();
            let branches: Vec<Branch> = step.iter().enumerate()
                .flat_map(|(i, d)| (0..d.1).map(move |b| Branch { depth: i + 1, token: (d.2 + b as u32) % 5 }))
                .collect();
            let after = |tail: &[u32]| target(&[&sequence[..], tail].concat(), vocab, seed);
            let mut choices: Vec<u32> = (0..=main.len()).map(|i| after(&main[..i])).collect();
            choices.extend(branches.iter().map(|b| after(&[&main[..b.depth - 1], &[b.token]].concat())));
            let outcome = accept(&main, &branches, &choices);
            prop_assert!((1..=main.len() + 1).contains(&outcome.emitted.len()));
            let expected = plain(&sequence, outcome.emitted.len(), vocab, seed);
            prop_assert_eq!(&outcome.emitted, &expected);
            prop_assert_eq!(outcome.emitted.len(), outcome.main + 1 + usize::from(outcome.branch.is_some()));
            // The state of the last row is that of the sequence without its last token.
            let row = outcome.last_row;
            prop_assert_eq!(choices[row], *outcome.emitted.last().unwrap());
            sequence.extend(outcome.emitted);
        }
    }

    /// The programme against trying every shape.
    #[test]
    fn the_plan_is_the_best_shape(
        rows in 1usize..8, counts in prop::collection::vec((0u64..50, 0u64..30, 0u64..20), 1..4),
    ) {
        let mut a = Acceptance::default();
        let mut left = 200u64;
        for (main, second, third) in counts {
            a.reached.push(left);
            a.main.push(main.min(left));
            a.salvaged.push([second, third, 0, 0]);
            left = main.min(left);
        }
        let value = |shape: &[usize]| -> f64 {
            let gain = |(d, &b): (usize, &usize)| a.main[d] + a.salvaged[d][..b].iter().sum::<u64>();
            1.0 + shape.iter().enumerate().map(gain).sum::<u64>() as f64 / 200.0
        };
        let mut best = 1.0f64;
        let mut shapes = vec![vec![]];
        while let Some(shape) = shapes.pop() {
            if 1 + shape.len() + shape.iter().sum::<usize>() <= rows {
                best = best.max(value(&shape));
                if shape.len() < a.reached.len() {
                    shapes.extend((0..=MAX_BRANCHES).map(|b| [&shape[..], &[b]].concat()));
                }
            }
        }
        let plan = best_plan(&a, rows, true);
        prop_assert!((plan.tokens_per_step - best).abs() < 1e-9);
        prop_assert!(plan.shape.rows() <= rows);
        prop_assert!(best_plan(&a, rows, false).tokens_per_step <= plan.tokens_per_step + 1e-9);
    }
}
