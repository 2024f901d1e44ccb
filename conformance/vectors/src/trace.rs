use super::Outcome;
use super::data::{Bytes, Expected, Input, Output, Phase, Step, Trace};
use super::invariants::Invariants;
use super::protocol::{Implementation, Reply, Request, shown};
use rdma_proto::wire::Message;
use serde::Serialize;

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
        run_step(implementation, &mut invariants, &mut early, step)
            .map_err(|problem| format!("step {}, {}: {problem}", number + 1, shown(&step.input)))?;
    }
    Ok(Outcome::Passed(invariants.lenient))
}

fn kebab(need: super::data::Need) -> String {
    serde_json::to_value(need).ok().and_then(|name| name.as_str().map(str::to_string)).unwrap_or_default()
}

struct StepResult {
    outputs: Vec<Output>,
    notifications: u64,
    end: Reply,
}

fn run_step(
    implementation: &mut dyn Implementation,
    invariants: &mut Invariants<'_>,
    early: &mut Vec<Output>,
    step: &Step,
) -> Result<(), String> {
    let mut done = StepResult { outputs: Vec::new(), notifications: 0, end: Reply::Disconnect };
    let before = invariants.telling();
    for _ in 0..step.times {
        invariants.input(&step.input);
        let mut replies = implementation.ask(&request(&step.input))?;
        done.end = replies.pop().ok_or("no answer")?;
        if !invariants.is_early() {
            done.outputs.append(early);
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
            match (output, done.outputs.last_mut()) {
                (Some(Output::Payload(more)), Some(Output::Payload(bytes))) => *bytes += more,
                (output, _) => done.outputs.extend(output),
            }
        }
    }
    done.notifications = invariants.telling() - before;
    if step.valid {
        compare_outputs(step, &done.outputs)?;
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

fn compare_outputs(step: &Step, outputs: &[Output]) -> Result<(), String> {
    if let Some(output) = outputs.iter().find(|output| step.forbid.contains(&output.kind())) {
        return Err(format!("it must not do {} here", shown(output)));
    }
    let Expected::Exactly(expected) = &step.out else { return Ok(()) };
    let differs = || format!("expected {}, it did {}", shown(expected), shown(&outputs));
    let mut missing = expected.clone();
    for output in outputs {
        let found = match step.any_order {
            true => missing.iter().position(|expected| expected == output),
            false => (missing.first() == Some(output)).then_some(0),
        };
        match found {
            Some(place) => drop(missing.remove(place)),
            None if step.optional.contains(output) => {}
            None => return Err(differs()),
        }
    }
    if missing.is_empty() { Ok(()) } else { Err(differs()) }
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
