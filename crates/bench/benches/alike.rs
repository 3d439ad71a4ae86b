//! `cargo bench -p bench --bench alike`: the embedded model against itself, in turn, request by request. How often do the intervals of such a
//! comparison leave out 1, which is the truth, and how far apart are the two? With threads of their own, and on the same.
//!
//! `COMPARISONS` in the environment: how many of each (default 80).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bench::compare::Comparison;
use bench::engine::{EngineTarget, encode};
use bench::prompts::PromptSet;
use bench::protocol::{Context, Monotonic, Prompt, Protocol, interleave};
use bench::stats::BootstrapOptions;
use runtime::checkpoint::Checkpoint;
use runtime::tokenizer::Tokenizer;
use runtime::{Engine, EngineOptions, Model};

const PROMPTS: usize = 16;
const TOKENS: usize = 64;
/// Comparisons by one pair of engines.
const OF_A_PAIR: usize = 8;

fn main() {
    let asked = std::env::var("COMPARISONS").ok().map(|n| n.parse::<usize>().expect("COMPARISONS is a number"));
    let comparisons = asked.unwrap_or(80);
    let dir = runtime::nano::directory().expect("the embedded model");
    let model = Arc::new(Model::load(Checkpoint::open(&dir).expect("its checkpoint")).expect("its weights"));
    let tokenizer = Tokenizer::open(&dir).expect("its tokenizer");
    let set = PromptSet::read(&dir.join("prompts/heldout.jsonl")).expect("its prompts").take(PROMPTS);
    let encoded = set.encode(|p| encode(p, &tokenizer, None)).expect("prompts of its tokens");
    let prompts: Vec<Prompt> = encoded.iter().map(Prompt::from).collect();
    let protocol =
        Protocol { warmup_prompts: 1, warmup_tokens: 8, max_tokens: TOKENS, ignore_eos: true, warmup_limit_ms: 500 };
    let (cancel, options) = (AtomicBool::new(false), BootstrapOptions::default());

    println!(
        "{comparisons} comparisons of {PROMPTS} prompts x {TOKENS} tokens each; an interval of 95 % should leave out 1 in 5 %"
    );
    println!("threads  shared  sd of the ratio  left out by the bootstrap  by ranks");
    for threads in [2, 1] {
        for shared in [false, true] {
            let (mut squares, mut bootstrap, mut ranks) = (0.0, 0, 0);
            let mut engines = None;
            for i in 0..comparisons {
                let engine = || {
                    let options = EngineOptions { threads, ..Default::default() };
                    Engine::new(model.clone(), &options).expect("an engine")
                };
                if i % OF_A_PAIR == 0 {
                    let a = EngineTarget::new("a", engine(), vec![], &cancel);
                    let b = EngineTarget::new("b", engine(), vec![], &cancel);
                    let b = if shared { b.on_threads_of(&a) } else { b };
                    engines = Some((a, b));
                }
                let (a, b) = engines.as_mut().expect("made above");
                let clock = Monotonic::start();
                let context = Context { clock: &clock, cancel: &cancel, progress: &mut |_| {} };
                let [ra, rb] = interleave(a, b, &prompts, &protocol, context).expect("a run");
                let c = Comparison::new(&ra, &rb, &options).expect("a comparison");
                let (interval, typical) = (c.speedup.interval, c.typical.expect("a typical prompt"));
                squares += typical.value.ln().powi(2);
                bootstrap += usize::from(interval.low > 1.0 || interval.high < 1.0);
                ranks += usize::from(typical.low > 1.0 || typical.high < 1.0);
            }
            let share = |n: usize| 100.0 * n as f64 / comparisons as f64;
            let sd = 100.0 * (squares / comparisons as f64).sqrt();
            println!("{threads:7}  {shared:6}  {sd:13.1} %  {:23.1} %  {:6.1} %", share(bootstrap), share(ranks));
        }
    }
}
