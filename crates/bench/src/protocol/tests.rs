use super::*;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// What happened: label, first token of the prompt, tokens asked for, ignore_eos.
type Log = Rc<RefCell<Vec<(String, u32, usize, bool)>>>;

#[derive(Clone, Default)]
struct Hand(Rc<Cell<f64>>);

impl Clock for Hand {
    fn now_ms(&self) -> f64 {
        self.0.get()
    }
}

/// A target that takes 10 ms to the first token and then `step_ms` a token.
struct Mock {
    label: String,
    log: Log,
    clock: Hand,
    step_ms: f64,
    /// Fails at the nth request.
    fails_at: Option<usize>,
    /// Returns that many tokens less.
    short: usize,
    requests: usize,
    /// Steps so far, and how many of them are slow.
    steps: usize,
    slow_steps: usize,
}

impl Target for Mock {
    fn label(&self) -> &str {
        &self.label
    }

    fn generate(
        &mut self,
        prompt: &Input,
        max_tokens: usize,
        ignore_eos: bool,
    ) -> std::result::Result<Sample, Failure> {
        let Input::Ids(prompt) = prompt else { panic!("the mock takes ids") };
        self.log.borrow_mut().push((self.label.clone(), prompt[0], max_tokens, ignore_eos));
        self.requests += 1;
        if self.fails_at == Some(self.requests) {
            return Err(Failure::Failed("the weights fell off".into()));
        }
        let steps = max_tokens - 1;
        self.clock.0.set(self.clock.0.get() + 10.0 + steps as f64 * self.step_ms);
        let output = Output::Ids(vec![prompt[0]; max_tokens - self.short]);
        // The first steps of its life are slow.
        let step = |i: usize| self.step_ms * if self.steps + i < self.slow_steps { 2.0 } else { 1.0 };
        let step_ms = (0..steps).map(step).collect();
        self.steps += steps;
        Ok(Sample { prompt_tokens: prompt.len(), output, prefill_ms: 10.0, step_ms })
    }
}

struct Setup {
    log: Log,
    clock: Hand,
    cancel: AtomicBool,
}

fn setup() -> Setup {
    Setup { log: Log::default(), clock: Hand::default(), cancel: AtomicBool::new(false) }
}

impl Setup {
    fn mock(&self, label: &str, step_ms: f64) -> Mock {
        let (log, clock) = (self.log.clone(), self.clock.clone());
        let label = label.into();
        Mock { label, log, clock, step_ms, fails_at: None, short: 0, requests: 0, steps: 0, slow_steps: 0 }
    }

    fn run(&self, target: &mut Mock, protocol: &Protocol) -> Result<Run> {
        run(target, &prompts(3), protocol, self.context(&mut |_| {}))
    }

    fn context<'a>(&'a self, progress: &'a mut dyn FnMut(Progress<'_>)) -> Context<'a> {
        Context { clock: &self.clock, cancel: &self.cancel, progress }
    }

    fn calls(&self) -> Vec<(u32, usize)> {
        self.log.borrow().iter().map(|c| (c.1, c.2)).collect()
    }
}

fn prompts(n: u32) -> Vec<Prompt> {
    (0..n).map(|i| Prompt { id: format!("p{i}"), input: Input::Ids(vec![i, 9, 9]) }).collect()
}

fn protocol() -> Protocol {
    Protocol { warmup_prompts: 4, warmup_tokens: 2, max_tokens: 6, ignore_eos: true, warmup_limit_ms: 0 }
}

#[test]
fn warm_ups_come_first_then_each_prompt_once_in_order() {
    let s = setup();
    let run = s.run(&mut s.mock("a", 2.0), &protocol()).unwrap();
    assert_eq!(s.calls(), [(0, 2), (1, 2), (2, 2), (0, 2), (0, 6), (1, 6), (2, 6)]);
    assert!(s.log.borrow().iter().all(|c| c.3), "end-of-sequence is ignored");
    assert_eq!((run.complete, run.failure.as_ref(), run.planned), (true, None, 3));
    assert_eq!(run.samples.iter().map(|s| s.id.as_str()).collect::<Vec<_>>(), ["p0", "p1", "p2"]);
}

#[test]
fn a_warm_up_lasts_until_steps_agree_or_time_is_up() {
    let s = setup();
    let mut cold = s.mock("a", 2.0);
    // One step a warm-up request.
    cold.slow_steps = 3;
    let patient = Protocol { warmup_limit_ms: 1000, ..protocol() };
    let done = s.run(&mut cold, &patient).unwrap();
    // 3 slow steps, then 5 that agree.
    assert_eq!(done.warmup, Warmup { requests: 8, steps: 8, steady: Some(true) });
    assert!(done.samples.iter().all(|s| s.wall_ms == 20.0), "no warm-up is timed");
    // A step that never agrees with the one before it.
    struct Restless(Mock);
    impl Target for Restless {
        fn label(&self) -> &str {
            "restless"
        }

        fn generate(&mut self, p: &Input, n: usize, eos: bool) -> std::result::Result<Sample, Failure> {
            self.0.step_ms *= 1.02;
            self.0.generate(p, n, eos)
        }
    }
    let mut restless = Restless(s.mock("b", 2.0));
    let done = run(&mut restless, &prompts(1), &patient, s.context(&mut |_| {})).unwrap();
    assert_eq!((done.warmup.steady, done.complete), (Some(false), true));
    assert!(done.warmup.requests > 20, "{:?}", done.warmup);
    let impatient = run(&mut restless, &prompts(1), &protocol(), s.context(&mut |_| {})).unwrap();
    assert_eq!(impatient.warmup.requests, 4);
    let one_token = Protocol { max_tokens: 1, ..patient };
    assert_eq!(s.run(&mut cold, &one_token).unwrap().warmup, Warmup { requests: 4, steps: 0, steady: None });
}

#[test]
fn outputs_are_kept_beside_the_samples() {
    let s = setup();
    let done = s.run(&mut s.mock("a", 2.0), &protocol()).unwrap();
    assert_eq!(done.outputs[2], Output::Ids(vec![2; 6]));
    let text = Output::Text { text: "ab".into(), tokens: 3 };
    assert_eq!((text.tokens(), text.sha256()), (3, sha256_hex(b"ab")));
}

#[test]
fn the_field_s_protocol_is_the_default() {
    let p = Protocol::default();
    assert_eq!((p.warmup_prompts, p.max_tokens, p.ignore_eos), (4, 512, true));
}

#[test]
fn the_rate_is_all_tokens_over_the_wall_time_with_prefill_and_without_warm_up() {
    let s = setup();
    let run = s.run(&mut s.mock("a", 2.0), &protocol()).unwrap();
    // Each of 3 requests: 10 ms + 5 steps of 2 ms for 6 tokens.
    assert_eq!((run.wall_s(), run.completion_tokens()), (0.060, 18));
    assert!((run.tokens_per_s().unwrap() - 300.0).abs() < 1e-9);
    let sample = &run.samples[1];
    assert_eq!((sample.wall_ms, sample.prefill_ms, sample.decode_ms), (20.0, 10.0, 10.0));
    assert_eq!((sample.prompt_tokens, sample.completion_tokens, sample.step_ms.len()), (3, 6, 5));
    assert_eq!(sample.token_sha256, token_sha256(&[1; 6]));
}

#[test]
fn time_between_requests_counts() {
    let s = setup();
    let clock = s.clock.clone();
    let mut slow_client = |p: Progress<'_>| clock.0.set(clock.0.get() + if p.warmup { 1000.0 } else { 5.0 });
    let run = run(&mut s.mock("a", 2.0), &prompts(3), &protocol(), s.context(&mut slow_client)).unwrap();
    // The pause after the last request and those of the warm-up are outside of the sequence.
    assert_eq!(run.samples.iter().map(|s| s.wall_ms).collect::<Vec<_>>(), [20.0, 25.0, 25.0]);
}

#[test]
fn two_targets_alternate_and_each_leads_equally_often() {
    let s = setup();
    let (mut a, mut b) = (s.mock("a", 2.0), s.mock("b", 1.0));
    let protocol = Protocol { warmup_prompts: 2, ..protocol() };
    let mut seen = Vec::new();
    let mut progress = |p: Progress<'_>| seen.push((p.label.to_string(), p.warmup, p.done, p.total));
    let [ra, rb] = interleave(&mut a, &mut b, &prompts(4), &protocol, s.context(&mut progress)).unwrap();
    let order: String = s.log.borrow().iter().map(|c| c.0.as_str()).collect();
    assert_eq!(order, "abba".to_string() + "abbaabba");
    assert_eq!(s.calls()[4..].iter().map(|c| c.0).collect::<Vec<_>>(), [0, 0, 1, 1, 2, 2, 3, 3]);
    assert!((ra.tokens_per_s().unwrap() - 300.0).abs() < 1e-9 && (rb.tokens_per_s().unwrap() - 400.0).abs() < 1e-9);
    assert!(ra.complete && rb.complete);
    assert_eq!((seen[3].clone(), seen[4].clone()), (("a".into(), true, 4, 4), ("a".into(), false, 1, 8)));
    let same = interleave(&mut s.mock("a", 1.0), &mut s.mock("a", 1.0), &prompts(1), &protocol, s.context(&mut |_| {}));
    assert!(same.unwrap_err().to_string().contains("two different ones"));
}

#[test]
fn a_cancel_keeps_what_is_done_and_marks_the_run() {
    let s = setup();
    let mut stop = |p: Progress<'_>| s.cancel.store(!p.warmup && p.done == 2, Ordering::Relaxed);
    let partial = run(&mut s.mock("a", 2.0), &prompts(3), &protocol(), s.context(&mut stop)).unwrap();
    assert_eq!((partial.complete, partial.samples.len(), partial.planned, partial.failure), (false, 2, 3, None));
    s.cancel.store(true, Ordering::Relaxed);
    let none = s.run(&mut s.mock("a", 2.0), &protocol()).unwrap();
    assert_eq!((none.complete, none.samples.len(), none.tokens_per_s()), (false, 0, None));
}

#[test]
fn a_failing_target_keeps_what_is_done_with_the_reason() {
    let s = setup();
    let mut late = s.mock("a", 2.0);
    late.fails_at = Some(6);
    let run = s.run(&mut late, &protocol()).unwrap();
    assert_eq!((run.complete, run.samples.len()), (false, 1));
    assert_eq!(run.failure.as_deref(), Some("request `p1`: the weights fell off"));
    let mut early = s.mock("a", 2.0);
    early.fails_at = Some(2);
    let run = s.run(&mut early, &protocol()).unwrap();
    assert_eq!((run.samples.len(), run.failure.as_deref()), (0, Some("warm-up `p1`: the weights fell off")));
}

#[test]
fn fewer_tokens_than_asked_for_are_a_failure_unless_it_may_stop() {
    let s = setup();
    let mut short = s.mock("a", 2.0);
    short.short = 1;
    let run = s.run(&mut short, &protocol()).unwrap();
    assert_eq!(run.failure.as_deref(), Some("warm-up `p0`: 1 tokens returned where 2 were asked for"));
    let free = Protocol { ignore_eos: false, ..protocol() };
    let run = s.run(&mut short, &free).unwrap();
    assert_eq!((run.complete, run.completion_tokens()), (true, 15));
    let mut nan = s.mock("a", f64::NAN);
    assert_eq!(s.run(&mut nan, &free).unwrap().failure.as_deref(), Some("warm-up `p0`: a time of NaN ms returned"));
}

#[test]
fn nothing_to_run_is_an_error_before_anything_is_run() {
    let s = setup();
    let mut target = s.mock("a", 1.0);
    let mut error = |prompts: &[Prompt], protocol: Protocol| {
        run(&mut target, prompts, &protocol, s.context(&mut |_| {})).unwrap_err().to_string()
    };
    assert_eq!(error(&[], protocol()), "prompts: expected at least one, found none");
    let empty = Prompt { id: "x".into(), input: Input::Ids(vec![]) };
    assert!(error(&[empty], protocol()).contains("none in `x`"));
    assert!(error(&prompts(1), Protocol { max_tokens: 0, ..protocol() }).starts_with("max_tokens"));
    assert!(error(&prompts(1), Protocol { warmup_tokens: 0, ..protocol() }).starts_with("warmup_tokens"));
    assert!(s.log.borrow().is_empty());
}
