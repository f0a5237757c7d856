//! As much of HTTP as llama-server's clients need: a request and its answer.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

/// Longer than any answer takes: a long prompt on a slow machine, or one behind sixteen others.
const PATIENCE: Duration = Duration::from_secs(2 * 3600);

/// Sends a request; the answer is read from the stream.
pub fn send(port: u16, method: &str, path: &str, body: &str) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    Ok(stream)
}

/// The status and the body.
pub fn request(port: u16, method: &str, path: &str, body: &Value) -> Result<(u16, Value)> {
    let text = if body.is_null() { String::new() } else { body.to_string() };
    let mut answer = Vec::new();
    send(port, method, path, &text)?.read_to_end(&mut answer)?;
    parse(&String::from_utf8_lossy(&answer)).with_context(|| format!("{method} {path}"))
}

fn parse(answer: &str) -> Result<(u16, Value)> {
    let (head, body) = answer.split_once("\r\n\r\n").context("an answer without a head")?;
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).context("an answer without a status")?;
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { joined(body) } else { body.to_string() };
    Ok((status, serde_json::from_str(&body).unwrap_or(Value::String(body))))
}

/// Chunks, each behind its length.
fn joined(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((length, rest)) = body.split_once("\r\n") {
        let Some(chunk) = usize::from_str_radix(length.trim(), 16).ok().and_then(|n| rest.get(..n)) else { break };
        whole += chunk;
        body = rest[chunk.len()..].trim_start_matches("\r\n");
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn answers() {
        let plain = "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{\"a\": 1}";
        assert_eq!(parse(plain).unwrap(), (200, json!({"a": 1})));
        let chunked = "HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{\"a\"\r\n4\r\n: 2}\r\n0\r\n\r\n";
        assert_eq!(parse(chunked).unwrap(), (404, json!({"a": 2})));
        assert!(parse("nothing").is_err());
    }
}
