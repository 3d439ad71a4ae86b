//! An OpenAI-compatible server as a target: `/v1/chat/completions` for a turn of a chat, `/v1/completions` for a text or token ids.
//!
//! Streamed (the default), the first piece of the completion ends the prefill and every further piece is a step; a piece may hold several
//! tokens. Not streamed, as in the field's timed stage, a request has one time. Tokens are the ids that the server shows
//! (`return_token_ids`, as vLLM does), or the number in its `usage`; without either there is no rate and the request fails.
//!
//! Whatever a server does wrong ends the run with the reason and keeps what is done: a status that is no success, an answer that is no
//! JSON, a stream that breaks off, silence beyond the time limit, fewer tokens than asked for.

use std::io::{BufRead, BufReader, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::protocol::{Failure, Input, Output, Sample, Target};

/// Largest answer that is read: 64 MB hold any completion.
const LARGEST: u64 = 64 << 20;
/// How often a request in progress looks at the cancel flag.
const POLL: Duration = Duration::from_millis(20);
/// Characters of an answer that an error shows.
const SHOWN: usize = 200;

/// How to talk to a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Its address, with or without `/v1`.
    pub url: String,
    /// The model to ask for; `None` for the first that it lists.
    pub model: Option<String>,
    /// Ask for the completion in pieces.
    pub stream: bool,
    /// Longest time for one request.
    pub timeout: Duration,
}

/// A server that answers.
pub struct Server<'a> {
    agent: ureq::Agent,
    base: String,
    model: String,
    stream: bool,
    timeout: Duration,
    cancel: &'a AtomicBool,
}

/// What came back for a request.
#[derive(Default)]
struct Answer {
    text: String,
    ids: Vec<u32>,
    prompt_tokens: Option<usize>,
    completion_tokens: Option<usize>,
    /// When each piece of the completion came, in ms from the start of the request.
    pieces: Vec<f64>,
    finished: bool,
}

impl<'a> Server<'a> {
    /// Asks the server for its models. `cancel` ends a request in progress.
    ///
    /// # Errors
    /// [`Error::Server`] where it does not answer as such a server does, or lists no model.
    pub fn connect(options: &ServerOptions, cancel: &'a AtomicBool) -> Result<Server<'a>> {
        let base = options.url.trim_end_matches('/').trim_end_matches("/v1").to_string();
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(options.timeout))
            .http_status_as_error(false)
            .build()
            .new_agent();
        let model = match &options.model {
            Some(model) => model.clone(),
            None => {
                let wrong = |reason| Error::Server { url: base.clone(), reason };
                let list = get(&agent, &format!("{base}/v1/models")).map_err(wrong)?;
                let first = list.pointer("/data/0/id").and_then(Value::as_str);
                first.ok_or_else(|| wrong("it lists no model; name one".into()))?.to_string()
            }
        };
        Ok(Server { agent, base, model, stream: options.stream, timeout: options.timeout, cancel })
    }

    /// The model that is asked for.
    pub fn model(&self) -> &str {
        &self.model
    }

    fn request(&self, prompt: &Input, max_tokens: usize, ignore_eos: bool) -> (String, Value) {
        let mut body = json!({
            "model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": self.stream, "return_token_ids": true,
        });
        if self.stream {
            body["stream_options"] = json!({"include_usage": true});
        }
        if ignore_eos {
            body["ignore_eos"] = true.into();
        }
        let path = match prompt {
            Input::Chat(text) => {
                body["messages"] = json!([{"role": "user", "content": text}]);
                "chat/completions"
            }
            Input::Text(text) => {
                body["prompt"] = text.as_str().into();
                "completions"
            }
            Input::Ids(ids) => {
                body["prompt"] = json!(ids);
                body["add_special_tokens"] = false.into();
                "completions"
            }
        };
        (format!("{}/v1/{path}", self.base), body)
    }
}

impl Target for Server<'_> {
    fn label(&self) -> &str {
        &self.model
    }

    fn generate(
        &mut self,
        prompt: &Input,
        max_tokens: usize,
        ignore_eos: bool,
    ) -> std::result::Result<Sample, Failure> {
        let (url, body) = self.request(prompt, max_tokens, ignore_eos);
        let (agent, stream, timeout) = (self.agent.clone(), self.stream, self.timeout);
        let (sender, receiver) = channel();
        // A thread of its own waits, so that a server that hangs cannot hold up a cancel.
        std::thread::spawn(move || {
            let begun = Instant::now();
            let answer = post(&agent, &url, &body, stream, begun);
            let answer = answer.map_err(|reason| match begun.elapsed() >= timeout {
                true => format!("no whole answer within {} s ({reason})", timeout.as_secs_f64()),
                false => reason,
            });
            // Nobody listens any more after a cancel.
            let _ = sender.send(answer);
        });
        let answer = loop {
            match receiver.recv_timeout(POLL) {
                Ok(answer) => break answer.map_err(Failure::Failed)?,
                Err(RecvTimeoutError::Timeout) if self.cancel.load(Ordering::Relaxed) => {
                    return Err(Failure::Cancelled);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(Failure::Failed("the request was given up".into())),
            }
        };
        sample(answer)
    }
}

fn sample(answer: Answer) -> std::result::Result<Sample, Failure> {
    let output = match (answer.ids.is_empty(), answer.completion_tokens) {
        (false, Some(told)) if told != answer.ids.len() => {
            let shown = answer.ids.len();
            return Err(Failure::Failed(format!("the server shows {shown} token ids and counts {told} tokens")));
        }
        (false, _) => Output::Shown { ids: answer.ids, text: answer.text },
        (true, Some(tokens)) => Output::Text { text: answer.text, tokens },
        (true, None) => {
            let reason = "the server tells neither token ids nor `usage`, so no rate follows; try without streaming";
            return Err(Failure::Failed(reason.into()));
        }
    };
    let step_ms = answer.pieces.windows(2).map(|w| w[1] - w[0]).collect();
    let prefill_ms = answer.pieces.first().copied().unwrap_or(0.0);
    Ok(Sample { prompt_tokens: answer.prompt_tokens.unwrap_or(0), output, prefill_ms, step_ms })
}

fn get(agent: &ureq::Agent, url: &str) -> std::result::Result<Value, String> {
    whole(agent.get(url).call().map_err(|e| format!("it does not answer: {e}"))?)
}

/// The JSON of an answer that is a success.
fn whole(mut response: ureq::http::Response<ureq::Body>) -> std::result::Result<Value, String> {
    let status = response.status();
    let text = response.body_mut().with_config().limit(LARGEST).read_to_string();
    let text = text.map_err(|e| format!("the answer breaks off: {e}"))?;
    if !status.is_success() {
        return Err(format!("it answers {status}: {}", shown(&text)));
    }
    serde_json::from_str(&text).map_err(|e| format!("the answer is not JSON ({e}): {}", shown(&text)))
}

fn shown(text: &str) -> String {
    let text: String = text.trim().chars().take(SHOWN).collect();
    if text.is_empty() { "nothing".into() } else { text.replace('\n', " ") }
}

fn post(
    agent: &ureq::Agent,
    url: &str,
    body: &Value,
    stream: bool,
    begun: Instant,
) -> std::result::Result<Answer, String> {
    let sent = agent.post(url).header("content-type", "application/json").send(body.to_string());
    let response = sent.map_err(|e| format!("it does not answer: {e}"))?;
    let mut answer = Answer::default();
    let now = || begun.elapsed().as_secs_f64() * 1e3;
    if !stream || !response.status().is_success() {
        let value = whole(response)?;
        answer.read(&value, "message", now())?;
        // One time for all of it.
        answer.pieces = vec![now()];
        return Ok(answer);
    }
    let reader = BufReader::new(response.into_body().into_reader().take(LARGEST));
    for line in reader.lines() {
        let line = line.map_err(|e| format!("the stream breaks off {}: {e}", answer.after()))?;
        // Comments and blank lines keep a connection alive.
        let Some(data) = line.strip_prefix("data:").map(str::trim) else { continue };
        if data == "[DONE]" {
            return Ok(answer);
        }
        let value: Value =
            serde_json::from_str(data).map_err(|e| format!("a piece is not JSON ({e}): {}", shown(data)))?;
        answer.read(&value, "delta", now())?;
    }
    match answer.finished {
        true => Ok(answer),
        false => Err(format!("the stream ends {} without being finished", answer.after())),
    }
}

impl Answer {
    /// Takes what a piece, or the whole answer, holds.
    fn read(&mut self, value: &Value, part: &str, now_ms: f64) -> std::result::Result<(), String> {
        if let Some(error) = value.get("error").filter(|e| !e.is_null()) {
            return Err(format!("it answers with an error: {}", shown(&error.to_string())));
        }
        let count = |name: &str| value.pointer(&format!("/usage/{name}")).and_then(Value::as_u64).map(|n| n as usize);
        self.prompt_tokens = count("prompt_tokens").or(self.prompt_tokens);
        self.completion_tokens = count("completion_tokens").or(self.completion_tokens);
        let Some(choice) = value.pointer("/choices/0") else { return Ok(()) };
        let inside = |name| choice.get(part).and_then(|p| p.get(name)).and_then(Value::as_str);
        let text = [inside("reasoning_content"), inside("content"), choice.get("text").and_then(Value::as_str)];
        let text: String = text.into_iter().flatten().collect();
        let ids = choice.get("token_ids").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        for id in ids {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            self.ids.push(id.ok_or_else(|| format!("a token id is none: {}", shown(&choice.to_string())))?);
        }
        if !text.is_empty() || !ids.is_empty() {
            self.pieces.push(now_ms);
        }
        self.text += &text;
        self.finished |= choice.get("finish_reason").is_some_and(|r| !r.is_null());
        Ok(())
    }

    fn after(&self) -> String {
        format!("after {} pieces", self.pieces.len())
    }
}
