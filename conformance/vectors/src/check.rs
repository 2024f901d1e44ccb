//! Runs vectors against an implementation.

use rdma_proto::wire::Message;

use super::data::{ControlVector, Fields, Verdict};
use super::invariants::RESERVED;
use super::protocol::{Implementation, Reply, Request, VERSION, shown};
use super::{Files, Outcome, trace};

/// The results of all vectors.
#[derive(Debug, Default)]
pub struct Report {
    /// Name and version of the implementation.
    pub who: String,
    /// How many vectors passed.
    pub passed: usize,
    /// Passed vectors that violated a *should*, and which one.
    pub lenient: Vec<(String, String)>,
    /// Skipped vectors, and why. None of them counts as passed.
    pub skipped: Vec<(String, String)>,
    /// Failed vectors, and why.
    pub failed: Vec<(String, String)>,
}

/// Runs the vectors whose id contains `select`.
///
/// # Errors
/// The implementation does not speak the protocol at all.
pub fn run(files: &Files, implementation: &mut dyn Implementation, select: &str) -> Result<Report, String> {
    let mut report = match implementation.ask(&Request::Hello { protocol: VERSION })?.as_slice() {
        [Reply::Hello { name, version, protocol: VERSION }] => {
            Report { who: format!("{name} {version}"), ..Report::default() }
        }
        other => {
            let answer = shown(&other);
            return Err(format!("not an implementation of version {VERSION} of the protocol: {answer}"));
        }
    };
    for vector in files.control.iter().flat_map(|(_, file)| &file.vectors) {
        report.add(&vector.id, select, || control(implementation, vector));
    }
    for one in files.traces.iter().flat_map(|(_, file)| &file.traces) {
        report.add(&one.id, select, || trace::run(implementation, one));
    }
    Ok(report)
}

impl Report {
    fn add(&mut self, id: &str, select: &str, run: impl FnOnce() -> Result<Outcome, String>) {
        if !id.contains(select) {
            return;
        }
        match run() {
            Ok(Outcome::Passed(lenient)) => {
                self.passed += 1;
                self.lenient.extend(lenient.into_iter().map(|reason| (id.to_string(), reason)));
            }
            Ok(Outcome::Skipped(reason)) => self.skipped.push((id.to_string(), reason)),
            Err(reason) => self.failed.push((id.to_string(), reason)),
        }
    }
}

fn control(implementation: &mut dyn Implementation, vector: &ControlVector) -> Result<Outcome, String> {
    let decoded = implementation.ask(&Request::Decode { hex: vector.hex.clone() })?;
    let expected = match (vector.fields, vector.reason) {
        (Some(fields), _) => Reply::Message { fields },
        (None, Some(reason)) => Reply::Invalid { reason },
        (None, None) => return Err("the vector has neither fields nor reason".to_string()),
    };
    match decoded.as_slice() {
        [Reply::Skip { reason }] => return Ok(Outcome::Skipped(reason.clone())),
        [decoded] if *decoded == expected => {}
        other => return Err(format!("decoded as {}, not {}", shown(&other), shown(&expected))),
    }
    let (Verdict::Valid, Some(fields)) = (vector.result, vector.fields) else {
        return Ok(Outcome::Passed(Vec::new()));
    };
    match implementation.ask(&Request::Encode { fields })?.as_slice() {
        [Reply::Bytes { hex }] if *hex == vector.hex => Ok(Outcome::Passed(Vec::new())),
        [Reply::Bytes { hex }]
            if Message::decode(&hex.0).is_ok_and(|message| Fields::from(message) == fields) =>
        {
            Ok(Outcome::Passed(vec![format!("encoded as {}: {RESERVED}", shown(hex))]))
        }
        [Reply::Skip { reason }] => Ok(Outcome::Skipped(reason.clone())),
        other => Err(format!("encoded as {}, not {}", shown(&other), shown(&vector.hex))),
    }
}
