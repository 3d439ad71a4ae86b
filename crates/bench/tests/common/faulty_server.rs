//! An OpenAI-compatible server that does what a script says, request by request.

// Each test has a script of its own.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

/// What it does with one completion request; the last entry of a script is repeated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Act {
    /// A whole answer, with the ids of its tokens.
    Ids,
    /// A whole answer, with a `usage` only.
    Usage,
    /// A whole answer that does not say how many tokens it has.
    Silent,
    /// Status 500.
    Status500,
    /// No answer for a long time.
    Hang,
    /// One token less than asked for.
    Short,
    /// Half of an answer, then the connection closes.
    Drop,
    /// Bytes that are no JSON.
    Garbage,
    /// An error object where a piece is expected.
    ErrorObject,
}

/// Starts it on a free port; the thread ends with the process. Returns its address.
pub fn start(script: &[Act]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let script = script.to_vec();
    std::thread::spawn(move || {
        let mut requests = 0;
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let Some((path, body)) = read_request(&stream) else { continue };
            if path.ends_with("/models") {
                reply(&mut stream, 200, "{\"data\": [{\"id\": \"scripted\"}]}");
                continue;
            }
            let act = script[requests.min(script.len() - 1)];
            requests += 1;
            // A hanging request must not keep the next one waiting.
            std::thread::spawn(move || perform(&mut stream, act, &path, &body));
        }
    });
    address
}

fn read_request(stream: &TcpStream) -> Option<(String, serde_json::Value)> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_string();
    let mut length = 0;
    loop {
        line.clear();
        reader.read_line(&mut line).ok()?;
        let header = line.trim().to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(n) = header.strip_prefix("content-length:") {
            length = n.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((path, serde_json::from_slice(&body).unwrap_or_default()))
}

fn reply(stream: &mut TcpStream, status: u16, body: &str) {
    let length = body.len();
    let head = format!("HTTP/1.1 {status} Said\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
    let _ = stream.write_all(format!("{head}{body}").as_bytes());
}

fn piece(stream: &mut TcpStream, value: serde_json::Value) {
    let _ = stream.write_all(format!("data: {value}\n\n").as_bytes());
    std::thread::sleep(Duration::from_millis(1));
}

fn perform(stream: &mut TcpStream, act: Act, path: &str, body: &serde_json::Value) {
    let asked = body["max_tokens"].as_u64().unwrap() as usize;
    assert_eq!((&body["temperature"], &body["ignore_eos"]), (&0.into(), &true.into()), "{body}");
    let tokens = if act == Act::Short { asked - 1 } else { asked };
    match act {
        Act::Status500 => return reply(stream, 500, "{\"error\": \"out of memory\"}"),
        Act::Hang => return std::thread::sleep(Duration::from_secs(60)),
        Act::Garbage if body["stream"] != true => return reply(stream, 200, "<html>hello</html>"),
        _ => {}
    }
    let chat = path.ends_with("/chat/completions");
    assert_eq!(body["messages"].is_array(), chat);
    let usage = serde_json::json!({"prompt_tokens": 7, "completion_tokens": tokens});
    if body["stream"] == true {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n");
        if chat {
            piece(stream, serde_json::json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]}));
        }
        for i in 0..tokens {
            if i == tokens / 2 {
                match act {
                    Act::Drop => return,
                    Act::Garbage => {
                        let _ = stream.write_all(b"data: {\"choices\": [{\"del\n\n");
                        return;
                    }
                    Act::ErrorObject => return piece(stream, serde_json::json!({"error": {"message": "worker died"}})),
                    _ => {}
                }
            }
            let mut choice = match chat {
                true => serde_json::json!({"delta": {"content": "x"}, "finish_reason": null}),
                false => serde_json::json!({"text": "x", "finish_reason": null}),
            };
            if act != Act::Usage && act != Act::Silent {
                choice["token_ids"] = serde_json::json!([i]);
            }
            piece(stream, serde_json::json!({"choices": [choice]}));
        }
        if act != Act::Silent {
            piece(stream, serde_json::json!({"choices": [], "usage": usage}));
        }
        let _ = stream.write_all(b"data: [DONE]\n\n");
        return;
    }
    let text = "x".repeat(tokens);
    let mut choice = match chat {
        true => serde_json::json!({"message": {"content": text}, "finish_reason": "length"}),
        false => serde_json::json!({"text": text, "finish_reason": "length"}),
    };
    if act != Act::Usage && act != Act::Silent {
        choice["token_ids"] = (0..tokens).collect();
    }
    let mut answer = serde_json::json!({"choices": [choice]});
    if act != Act::Silent {
        answer["usage"] = usage;
    }
    let answer = answer.to_string();
    match act {
        Act::Drop => {
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", answer.len());
            let _ = stream.write_all(format!("{head}{}", &answer[..answer.len() / 2]).as_bytes());
        }
        Act::ErrorObject => reply(stream, 200, "{\"error\": {\"message\": \"worker died\"}}"),
        _ => reply(stream, 200, &answer),
    }
}
