use std::borrow::Cow;

use super::Outcome;
use super::data::{Bytes, Expected, Fields, Hex, Input, Need, Output, Phase, Step, Trace};
use super::invariants::Invariants;
use super::protocol::{Implementation, Reply, Request, shown};
use rdma_proto::wire::Message;
use serde::Serialize;
use suite::Role;

/// Runs `trace`. An error names the step and the mistake.
pub(super) fn run(implementation: &mut dyn Implementation, trace: &Trace) -> Result<Outcome, String> {
    let needs: Vec<String> = trace.needs.iter().map(|need| kebab(*need)).collect();
    let start = Request::Start {
        trace: trace.id.clone(),
        role: trace.role,
        needs: needs.join(" "),
        settings: Box::new(trace.settings.clone()),
    };
    match implementation.ask(&start)?.as_slice() {
        [Reply::Ok { .. }] => {}
        [Reply::Skip { reason }] => return Ok(Outcome::Skipped(reason.clone())),
        other => return Err(format!("it answered the start with {}", shown(&other))),
    }
    let mut invariants = Invariants::new(trace);
    let mut early = Vec::new();
    for (number, step) in trace.steps.iter().enumerate() {
        run_step(implementation, &mut invariants, &mut early, trace, step)
            .map_err(|problem| format!("step {}, {}: {problem}", number + 1, shown(&step.input)))?;
    }
    Ok(Outcome::Passed(invariants.lenient))
}

fn kebab(need: Need) -> String {
    serde_json::to_value(need).ok().and_then(|name| name.as_str().map(str::to_string)).unwrap_or_default()
}

struct StepResult {
    outputs: Vec<Output>,
    /// Notifications that a step asks for, or that it may ask for.
    notifications: u64,
    end: Reply,
}

impl StepResult {
    /// Passes `input` to the implementation and records what it does.
    fn take(
        &mut self,
        implementation: &mut dyn Implementation,
        invariants: &mut Invariants<'_>,
        early: &mut Vec<Output>,
        input: &Input,
    ) -> Result<(), String> {
        invariants.input(input);
        let mut replies = implementation.ask(&request(input))?;
        self.end = replies.pop().ok_or("no answer")?;
        if !invariants.is_early() {
            self.outputs.append(early);
        }
        for reply in &replies {
            let output = invariants.output(reply)?;
            if let Some(Output::Send(message)) = output
                && invariants.is_early()
            {
                // It counts as sent when the connection is established.
                early.push(Output::Send(message));
                continue;
            }
            self.outputs.extend(output);
        }
        Ok(())
    }
}

fn run_step(
    implementation: &mut dyn Implementation,
    invariants: &mut Invariants<'_>,
    early: &mut Vec<Output>,
    trace: &Trace,
    step: &Step,
) -> Result<(), String> {
    let mut done = StepResult { outputs: Vec::new(), notifications: 0, end: Reply::Disconnect };
    let before = invariants.telling();
    for _ in 0..step.times {
        let input = invariants.addressed(&step.input, step.valid);
        done.take(implementation, invariants, early, &input)?;
        // Bytes may leave in any number of requests: its device completes those that it has posted.
        while invariants.waits_for_completions(&done.end) {
            let posted = invariants.requests;
            done.take(implementation, invariants, early, &Input::Acknowledged {})?;
            if posted == invariants.requests {
                break;
            }
        }
    }
    let free = done.outputs.iter().filter(|output| may_always(trace, output)).count() as u64;
    done.notifications = (invariants.telling() - before).saturating_sub(free);
    if step.valid {
        compare_outputs(trace, step, &done.outputs)?;
    } else if done.outputs != [Output::Disconnect] {
        return Err(format!(
            "must be refused with a disconnect and nothing else; it did {}",
            shown(&done.outputs)
        ));
    }
    if let Reply::Ok { state, .. } = done.end
        && invariants.owes_disconnect(state)
    {
        return Err(format!(
            "its state is {}, and it has not disconnected (VR-CLOSE-001, VR-CLOSE-007)",
            shown(&state)
        ));
    }
    compare_state(step, &done, invariants.notifications)
}

fn request(input: &Input) -> Request {
    match input.clone() {
        Input::Established { rnr_retry } => Request::Established { rnr_retry },
        Input::Receive { message } => {
            Request::Receive { hex: Bytes(Message::from(message).encode().to_vec()) }
        }
        Input::Bytes { hex } => Request::Receive { hex },
        Input::Immediate { value } => Request::Immediate { value },
        Input::Write { length } => Request::Write { length },
        Input::Read { length } => Request::Read { length },
        Input::Acknowledged {} => Request::Acknowledged,
        Input::Failed { status } => Request::Failed { status },
        Input::Disconnected {} => Request::Disconnected,
        Input::Advance { ms } => Request::Advance { ms },
        Input::Close { within_ms } => Request::Close { within_ms },
    }
}

fn compare_outputs(trace: &Trace, step: &Step, outputs: &[Output]) -> Result<(), String> {
    if let Some(output) = outputs.iter().find(|output| step.forbid.contains(&output.kind())) {
        return Err(format!("it must not do {} here", shown(output)));
    }
    let Expected::Exactly(expected) = &step.out else { return Ok(()) };
    let mut found: Vec<Cow<'_, Output>> = Vec::new();
    for output in outputs {
        if may_always(trace, output) && !expected.contains(output) {
            continue;
        }
        // Pieces of what is asked for, also if something else is between them and may be.
        let before = match step.any_order {
            true => found.iter_mut().find(|before| matches!(***before, Output::Payload(_))),
            false => found.last_mut(),
        };
        match (output, before.map(Cow::to_mut)) {
            (Output::Payload(more), Some(Output::Payload(bytes))) => *bytes += more,
            _ => found.push(Cow::Borrowed(output)),
        }
    }
    let differs = || format!("expected {}, it did {}", shown(expected), shown(&outputs));
    let mut missing = expected.clone();
    for output in &found {
        let place = match step.any_order {
            true => missing.iter().position(|expected| *expected == **output),
            false => (missing.first() == Some(&**output)).then_some(0),
        };
        match place {
            Some(place) => drop(missing.remove(place)),
            None if step.optional.contains(output) => {}
            None => return Err(differs()),
        }
    }
    if missing.is_empty() { Ok(()) } else { Err(differs()) }
}

/// Returns whether a *may* allows the output at any time, so that no step asks for it: a question
/// or a choice of nothing by a client (VR-FEAT-001), a Keepalive (VR-KEEP-007). Traces about these
/// parts say when they are due.
fn may_always(trace: &Trace, output: &Output) -> bool {
    let about = |need| trace.needs.contains(&need);
    match output {
        Output::Send(Fields::GetServerFeature { .. } | Fields::SetClientFeature { features: Hex(0), .. }) => {
            trace.role == Role::Client && !about(Need::Negotiation)
        }
        Output::Send(Fields::Keepalive {}) => !about(Need::Keepalive),
        _ => false,
    }
}

fn compare_state(step: &Step, done: &StepResult, in_all: u64) -> Result<(), String> {
    let Reply::Ok { state, unread, unsent, blame } = done.end else {
        return Err(format!("the answer ends with {}", shown(&done.end)));
    };
    let check = &step.check;
    let expected_state = if step.valid { check.state } else { Some(Phase::Failed) };
    same("state", expected_state, state)?;
    same("unread", check.unread, unread)?;
    same("unsent", check.unsent, unsent)?;
    same("notifications", check.notifications, done.notifications)?;
    if let Some(blame) = blame {
        same("blame", check.blame, blame)?;
    }
    no_more("notifications", check.notifications_at_most, done.notifications)?;
    no_more("notifications in all", check.notifications_in_all_at_most, in_all)
}

fn no_more(what: &str, most: Option<u64>, found: u64) -> Result<(), String> {
    match most {
        Some(most) if found > most => Err(format!("{found} {what}, where {most} are allowed")),
        _ => Ok(()),
    }
}

fn same<T: PartialEq + Serialize>(what: &str, expected: Option<T>, found: T) -> Result<(), String> {
    match expected {
        Some(expected) if expected != found => {
            Err(format!("{what} is {}, not {}", shown(&found), shown(&expected)))
        }
        _ => Ok(()),
    }
}
