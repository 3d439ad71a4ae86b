//! Every check is seen to fail: each meets a mistake that it has to find, in a kernel or in what a kernel is given.

use super::{Outcome, Subject, checks};
use crate::device::{Alteration, Argument, Backend, Device, Launch, exchange};

/// Changes one argument of one kernel.
fn argument(kernel: &'static str, index: usize, change: fn(&mut Argument)) -> Alteration {
    Box::new(move |launch| {
        if launch.kernel == kernel {
            change(&mut launch.arguments[index]);
        }
    })
}

/// Two arguments of one kernel change places.
fn swap(kernel: &'static str, one: usize, other: usize) -> Alteration {
    Box::new(move |launch: &mut Launch| {
        if launch.kernel == kernel {
            launch.arguments.swap(one, other);
        }
    })
}

fn one_less(argument: &mut Argument) {
    match argument {
        Argument::I32(v) => *v -= 1,
        Argument::U32(v) => *v -= 1,
        Argument::U64(v) => *v -= 1,
        Argument::F32(v) => *v -= 1.0,
        Argument::Pointer(..) => panic!("a pointer is not counted down"),
    }
}

/// Merged sums go where partial ones are.
fn astray(launch: &mut Launch) {
    if launch.kernel == "attention_combine" {
        launch.arguments[8] = launch.arguments[6].clone();
    }
}

/// Checks, the mistake, and what makes it.
fn mistakes() -> Vec<(&'static str, &'static str, Alteration)> {
    vec![
        ("mma f16", "operands of another type", exchange(&[("probe_mma_f16", "probe_mma_bf16")])),
        ("mma bf16", "operands of another type", exchange(&[("probe_mma_bf16", "probe_mma_f16")])),
        ("mma s8", "a step of k is left out", argument("probe_mma_s8", 3, one_less)),
        ("read", "the last vector is not read", argument("probe_read", 2, one_less)),
        ("copy", "the last vector is not copied", argument("probe_copy", 2, one_less)),
        ("kernel in a graph", "a kernel counts too little", argument("probe_count", 1, one_less)),
        ("boundary", "every piece ends a vector early", argument("probe_read", 2, one_less)),
        ("grid barrier", "a round is left out", argument("probe_barrier", 2, one_less)),
        ("pinned ring", "the last word is not handed over", argument("probe_post", 2, one_less)),
        (
            "gemm integers",
            "the last inputs are left out",
            argument("gemm_int8_dot_m8", 9, |k| {
                if let Argument::I32(k) = k {
                    *k -= 16;
                }
            }),
        ),
        ("gemm accuracy", "scales of other channels", exchange(&[("gemm_int3_g64_m16", "gemm_mutant_scale")])),
        ("fused stream", "a norm's last unit is left out", exchange(&[("gemm_int3_g64_m16", "gemm_mutant_norm_unit")])),
        (
            "fused heads",
            "a head ends one column too early",
            exchange(&[("gemm_int3_g64_m16", "gemm_mutant_head_early")]),
        ),
        (
            "fused choice",
            "ties to the first row of the head",
            exchange(&[("gemm_int3_g64_m16", "gemm_mutant_best_row")]),
        ),
        ("fused pair", "no barrier between the products", exchange(&[("pair_int4_g128_m8", "pair_no_barrier")])),
        ("attention accuracy", "a bound one too far", exchange(&[("attention_any", "attention_bound_too_far")])),
        (
            "attention bits",
            "chunks that begin at the step's base",
            exchange(&[("attention_any", "attention_border_at_base"), ("attention_combine", "combine_border_at_base")]),
        ),
        (
            "attention branches",
            "a branch's key from the chain",
            Box::new(|launch| {
                if launch.kernel == "attention_combine" {
                    launch.arguments[3] = launch.arguments[1].clone();
                }
            }),
        ),
        (
            "attention branches",
            "an own key before its rounding, where a row is alone",
            exchange(&[("attention_combine", "combine_self_unrounded")]),
        ),
        ("attention stale", "a bound one too far", exchange(&[("attention_any", "attention_bound_too_far")])),
        ("attention order", "chunks merged backwards", exchange(&[("attention_combine", "combine_swapped_chunks")])),
        ("rows norms", "the stream is scaled by another number", argument("add_normed", 3, one_less)),
        ("rows embeddings", "embeddings are scaled by another number", argument("embed", 6, one_less)),
        ("rows embeddings", "rows of another layer", argument("combine_per_layer", 6, one_less)),
        ("rows gated", "gate and other change places", swap("gated", 0, 1)),
        ("rows heads", "keys and values change places", swap("finish_heads", 6, 7)),
        (
            "rows heads",
            "branches write into the chain",
            Box::new(|launch| {
                if launch.kernel == "finish_heads" {
                    launch.arguments[8] = launch.arguments[6].clone();
                }
            }),
        ),
        ("rows bits", "lanes by the number of rows", exchange(&[("rms_norm", "norm_lanes_by_rows")])),
        ("decide choice", "ties to the highest id", exchange(&[("best_token", "best_token_highest_tie")])),
        ("decide score", "another softcap", argument("score", 5, one_less)),
        ("decide steps", "a branch of any depth is accepted", exchange(&[("accept", "accept_any_branch")])),
        (
            "decide settle",
            "the place of a row of another depth",
            argument("settle", 7, |main| {
                one_less(main);
                one_less(main);
            }),
        ),
        ("decide look-up", "a depth is left out", argument("look_up", 3, one_less)),
        (
            "draft accuracy",
            "a phase runs twice, the next not at all",
            Box::new(|launch| {
                if launch.kernel == "draft_phase_bf16"
                    && let Some(Argument::I32(phase)) = launch.arguments.get_mut(12)
                    && *phase == 7
                {
                    *phase = 6;
                }
            }),
        ),
        ("draft persistent", "a barrier is left out", exchange(&[("draft_all_bf16", "draft_all_dropped_barrier")])),
        ("draft persistent", "a pass is left out", argument("draft_all_int8", 11, one_less)),
        ("attention speed", "attention writes elsewhere", Box::new(astray)),
        ("layer speed", "attention writes elsewhere", Box::new(astray)),
        ("draft speed", "no pass is made", argument("draft_all_bf16", 11, one_less)),
    ]
}

/// Checks without a mistake here: nothing runs in an empty graph; the other mistakes of matrix products are those of
/// `tests/gemm/mutants.rs`.
const ELSEWHERE: [&str; 4] = ["empty graph", "gemm bits", "gemm mutations", "gemm speed"];

#[test]
fn every_check_finds_its_mistake() {
    let device = Device::open(Backend::Emulated).unwrap();
    let subject = Subject::new(device.clone());
    let all = checks();
    let mistakes = mistakes();
    for check in &all {
        let planted = mistakes.iter().filter(|m| m.0 == check.name).count();
        assert_eq!(planted == 0, ELSEWHERE.contains(&check.name), "{} has {planted} mistakes", check.name);
    }
    let mut missed = Vec::new();
    for (name, mistake, alteration) in mistakes {
        let check = all.iter().find(|check| check.name == name).unwrap();
        // SAFETY: a checked device makes a wrong access an error; it takes no argument of another size.
        unsafe { device.alter(Some(alteration)) };
        let finding = subject.run(check);
        println!("{name}: {mistake}: {:.1} s: {:?}", finding.seconds, finding.outcome);
        if finding.outcome == Outcome::Passed {
            missed.push(format!("{name}: {mistake}"));
        }
    }
    assert!(missed.is_empty(), "not found:\n{}", missed.join("\n"));
}
