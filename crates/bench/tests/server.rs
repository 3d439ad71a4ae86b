//! A server that answers, and one that does everything wrong that a server can.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bench::protocol::{Context, Input, Monotonic, Output, Prompt, Protocol, Run, run};
use bench::server::{Server, ServerOptions};
use ppl::identity::token_sha256;

#[path = "common/faulty_server.rs"]
mod faulty_server;

use faulty_server::{Act, start};

const TOKENS: usize = 8;

fn prompts() -> Vec<Prompt> {
    let text = |i: usize| match i {
        2 => Input::Text("Once".into()),
        _ => Input::Chat("Hello".into()),
    };
    (0..4).map(|i| Prompt { id: format!("p{i}"), input: text(i) }).collect()
}

fn options(url: &str, stream: bool) -> ServerOptions {
    ServerOptions { url: url.into(), model: None, stream, timeout: Duration::from_secs(3) }
}

fn measure(script: &[Act], stream: bool, cancel: &AtomicBool) -> Run {
    let url = start(script);
    let mut server = Server::connect(&options(&format!("{url}/v1/"), stream), cancel).unwrap();
    assert_eq!(server.model(), "scripted");
    let protocol = Protocol { warmup_prompts: 0, max_tokens: TOKENS, ..Default::default() };
    let context = Context { clock: &Monotonic::start(), cancel, progress: &mut |_| {} };
    run(&mut server, &prompts(), &protocol, context).unwrap()
}

#[test]
fn answers_are_timed_whole_or_in_pieces() {
    let go = AtomicBool::new(false);
    for stream in [true, false] {
        let done = measure(&[Act::Ids], stream, &go);
        assert!(done.complete, "{:?}", done.failure);
        let sample = &done.samples[2];
        let ids: Vec<u32> = (0..TOKENS as u32).collect();
        assert_eq!((sample.prompt_tokens, sample.completion_tokens), (7, TOKENS));
        assert_eq!(
            (&done.outputs[2], &sample.token_sha256),
            (&Output::Shown { ids: ids.clone(), text: "x".repeat(TOKENS) }, &token_sha256(&ids))
        );
        assert_eq!(sample.step_ms.len(), if stream { TOKENS - 1 } else { 0 });
        assert!(sample.prefill_ms > 0.0 && sample.wall_ms >= sample.prefill_ms + sample.decode_ms, "{sample:?}");
        let counted = measure(&[Act::Usage], stream, &go);
        assert_eq!(counted.outputs[0], Output::Text { text: "x".repeat(TOKENS), tokens: TOKENS });
    }
}

#[test]
fn what_a_server_does_wrong_ends_the_run_with_the_reason_and_keeps_what_is_done() {
    let go = AtomicBool::new(false);
    for stream in [true, false] {
        for (act, reason) in [
            (Act::Status500, "it answers 500 Internal Server Error: {\"error\": \"out of memory\"}"),
            (Act::Hang, "no whole answer within 3 s"),
            (Act::Short, "7 tokens returned where 8 were asked for"),
            (Act::Drop, if stream { "the stream ends after 4 pieces" } else { "the answer breaks off" }),
            (Act::Garbage, if stream { "a piece is not JSON" } else { "the answer is not JSON" }),
            (Act::ErrorObject, "it answers with an error: {\"message\":\"worker died\"}"),
            (Act::Silent, "the server tells neither token ids nor `usage`"),
        ] {
            let cut = measure(&[Act::Ids, Act::Ids, act], stream, &go);
            let failure = cut.failure.unwrap_or_else(|| panic!("{act:?} was not noticed"));
            assert!(failure.starts_with("request `p2`: ") && failure.contains(reason), "{act:?}: {failure}");
            assert_eq!((cut.complete, cut.samples.len(), cut.planned), (false, 2, 4), "{act:?}");
        }
    }
}

#[test]
fn a_server_that_hangs_does_not_hold_up_a_cancel() {
    let cancel = AtomicBool::new(false);
    let cut = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            cancel.store(true, Ordering::Relaxed);
        });
        measure(&[Act::Ids, Act::Hang], true, &cancel)
    });
    // Had it waited for the time limit, that would be the failure.
    assert_eq!((cut.samples.len(), cut.failure), (1, None));
}

#[test]
fn who_is_no_such_server_is_named() {
    let go = AtomicBool::new(false);
    let error = |url: &str| Server::connect(&options(url, true), &go).err().unwrap().to_string();
    // A port that was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert!(error(&format!("http://{free}")).contains("it does not answer"), "{}", error(&format!("http://{free}")));
    assert!(error("not a url").contains("not a url"));
}
