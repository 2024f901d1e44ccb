//! Checks the vectors themselves.

use std::collections::BTreeSet;

use rdma_proto::InvalidMessage;
use rdma_proto::wire::{MESSAGE_LEN, Message};

use super::Files;
use super::data::{
    Bytes, CONTROL_FORMAT, ControlFile, ControlVector, Fields, Input, Reason, TRACE_FORMAT, Trace, Verdict,
};
use super::ours::status_of;
use super::protocol::shown;

/// Returns all mistakes in the vectors: formats, ids, requirements, flags, and bytes that do not
/// match their fields. `is_must` returns for each requirement whether it is a *must*. A trace
/// without one is for implementations with an optional part.
pub fn problems(files: &Files, is_must: impl Fn(&str) -> Option<bool>) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, file) in &files.control {
        if file.format != CONTROL_FORMAT {
            problems.push(format!("control/{name}: format {}, not {CONTROL_FORMAT}", file.format));
        }
        problems.extend(flags(name, file));
        for vector in &file.vectors {
            problems.extend(misplaced(&vector.id, "control", name));
            problems.extend(wrong_bytes(vector).map(|problem| format!("{}: {problem}", vector.id)));
        }
    }
    for (name, file) in &files.traces {
        if file.format != TRACE_FORMAT {
            problems.push(format!("trace/{name}: format {}, not {TRACE_FORMAT}", file.format));
        }
        for trace in &file.traces {
            problems.extend(misplaced(&trace.id, "trace", name));
            problems.extend(steps(trace).map(|problem| format!("{}: {problem}", trace.id)));
            if trace.needs.is_empty() && !trace.requirements.iter().any(|one| is_must(one) == Some(true)) {
                problems.push(format!("{}: it shows no must, and `needs` no part", trace.id));
            }
        }
    }
    let mut seen = BTreeSet::new();
    for (id, of) in files.requirements() {
        let unknown = of.iter().filter(|of| is_must(of).is_none());
        problems.extend(unknown.map(|unknown| format!("{id}: there is no requirement {unknown}")));
        if of.is_empty() {
            problems.push(format!("{id}: no requirement"));
        }
        if let Some(id) = seen.replace(id) {
            problems.push(format!("{id} is there twice"));
        }
    }
    problems
}

fn misplaced(id: &str, kind: &str, file: &str) -> Option<String> {
    let name = id.strip_prefix(kind)?.strip_prefix('/')?.strip_prefix(file)?.strip_prefix('/');
    let plain = |name: &str| name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    match name {
        Some(name) if plain(name) && !name.is_empty() => None,
        _ => Some(format!("{id} is not an id for {kind}/{file}.json")),
    }
}

fn flags(name: &str, file: &ControlFile) -> Vec<String> {
    let used: BTreeSet<&String> = file.vectors.iter().flat_map(|vector| &vector.flags).collect();
    let explained: BTreeSet<&String> = file.notes.keys().collect();
    let one_sided = used.symmetric_difference(&explained);
    one_sided.map(|flag| format!("control/{name}: the flag {flag} is not both used and explained")).collect()
}

fn wrong_bytes(vector: &ControlVector) -> Option<String> {
    let Bytes(bytes) = &vector.hex;
    let decoded = Message::decode(bytes);
    match (vector.result, vector.fields, vector.reason) {
        (Verdict::Invalid, None, Some(reason)) => match (decoded, reason) {
            (Err(InvalidMessage::UnknownOpcode { .. }), Reason::Opcode) => None,
            (Err(InvalidMessage::Length { length }), Reason::Length) if length != MESSAGE_LEN => None,
            (Ok(message), _) => Some(format!("decodes as {}", shown(&Fields::from(message)))),
            (Err(error), _) => Some(format!("does not decode: {error}")),
        },
        (Verdict::Valid | Verdict::Acceptable, Some(fields), None) => {
            let encoded = Message::from(fields).encode();
            let is_canonical = encoded == bytes[..];
            match decoded {
                Ok(message) if Fields::from(message) != fields => {
                    Some(format!("decodes as {}", shown(&Fields::from(message))))
                }
                Ok(_) if is_canonical != (vector.result == Verdict::Valid) => {
                    Some(format!("encodes as {}", shown(&Bytes(encoded.to_vec()))))
                }
                Ok(_) => None,
                Err(error) => Some(error.to_string()),
            }
        }
        _ => Some("fields belong to what is understood, a reason to what is not".to_string()),
    }
}

fn steps(trace: &Trace) -> impl Iterator<Item = String> {
    trace.steps.iter().enumerate().filter_map(|(number, step)| {
        let problem = match &step.input {
            Input::Failed { status } => status_of(status).err(),
            Input::Receive { message: Fields::RegisterXferMemory { rkey, .. } }
                if rkey.0 > u64::from(u32::MAX) =>
            {
                Some(format!("a key of more than 32 bits: {}", shown(rkey)))
            }
            _ if step.times == 0 => Some("nothing happens zero times".to_string()),
            _ => None,
        };
        problem.map(|problem| format!("step {}: {problem}", number + 1))
    })
}
