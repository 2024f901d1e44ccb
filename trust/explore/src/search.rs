//! Every schedule of a model, breadth first.
//!
//! Delivery must be *inevitable*: if every path ends, and ends only in goal states, every schedule
//! reaches a goal, however unfair it is. So the search keeps one layer of states at a time (equal
//! states at one depth are one state), and checks that each breaks no invariant, and has a
//! successor or is a goal. It finds endless paths by their depth. To print a path it keeps one byte
//! and one index per state.
//!
//! This is not stateright, whose `eventually` is documented to miss violations on paths that join,
//! and whose table of all visited states would limit the size.

use std::collections::HashSet;
use std::hash::{BuildHasher, Hash, RandomState};
use std::time::{Duration, Instant};

/// A system that moves from state to state in numbered steps.
pub trait Model {
    /// Everything that affects the future.
    type State: Clone + Hash;

    /// Returns the first state.
    fn start(&self) -> Self::State;
    /// Returns the number of different steps. Not all are possible in each state.
    fn steps(&self) -> u8;
    /// Takes a step. Returns `None` if it is not possible in this state.
    ///
    /// # Errors
    /// An invariant is broken.
    fn take(&self, state: &Self::State, step: u8) -> Option<Result<Self::State, String>>;
    /// Returns whether this is a goal: a state in which everything may end.
    fn is_goal(&self, state: &Self::State) -> bool;
    /// Describes a step.
    fn describe(&self, step: u8) -> String;
}

/// The statistics of a search.
#[allow(missing_docs)] // the others are plain
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub states: u64,
    pub steps: u64,
    pub goals: u64,
    /// Steps on the longest path.
    pub depth: usize,
    /// The most states of one depth.
    pub widest: usize,
    pub took: Duration,
}

/// A broken rule, and the steps that lead to it.
#[derive(Clone, Debug)]
pub struct Violation {
    /// A description of the fault.
    pub what: String,
    /// A shortest path to it.
    pub path: Vec<String>,
}

/// How a search ended.
#[derive(Clone, Debug)]
pub enum SearchEnd {
    /// All states were visited, and no rule is broken.
    Complete,
    /// A rule is broken.
    Violated(Violation),
    /// There are more states than the limit. No rule is broken in the visited ones.
    Truncated,
}

/// A path of this length does not end.
const LONGEST: usize = 2000;

/// Explores `model`, up to `limit` states.
pub fn explore<M: Model>(model: &M, limit: u64) -> (Seen, SearchEnd) {
    let (begun, hasher) = (Instant::now(), RandomState::new());
    let mut seen = Seen { states: 1, widest: 1, ..Seen::default() };
    let mut layer = vec![model.start()];
    // Of each layer: the state of the previous layer, and the step, that led to each state.
    let mut origins: Vec<Vec<(u32, u8)>> = vec![vec![(0, 0)]];
    let end = loop {
        let (mut next, mut from) = (Vec::new(), Vec::new());
        // Fingerprints of 64 bits instead of states: of a million in a layer, two collide with a
        // probability of 3 in 10^8, and others in the next run.
        let mut known = HashSet::new();
        let mut flaw = None;
        'layer: for (place, state) in layer.iter().enumerate() {
            let mut ends = true;
            for step in 0..model.steps() {
                let Some(result) = model.take(state, step) else { continue };
                ends = false;
                seen.steps += 1;
                match result {
                    Ok(state) => {
                        if known.insert(hasher.hash_one(&state)) {
                            next.push(state);
                            from.push((place as u32, step));
                        }
                    }
                    Err(what) => {
                        flaw = Some((what, place, Some(step)));
                        break 'layer;
                    }
                }
            }
            if ends {
                if !model.is_goal(state) {
                    let what = "deadlock: nothing can happen, and not everything has arrived";
                    flaw = Some((what.into(), place, None));
                    break;
                }
                seen.goals += 1;
            }
        }
        if let Some((what, place, last)) = flaw {
            break SearchEnd::Violated(Violation { what, path: path(model, &origins, place, last) });
        }
        if next.is_empty() {
            break SearchEnd::Complete;
        }
        seen.states += next.len() as u64;
        seen.depth += 1;
        seen.widest = seen.widest.max(next.len());
        origins.push(from);
        if seen.depth > LONGEST {
            break SearchEnd::Violated(Violation {
                what: "livelock: it goes on for ever".into(),
                path: path(model, &origins, 0, None),
            });
        }
        if seen.states > limit {
            break SearchEnd::Truncated;
        }
        layer = next;
    };
    seen.took = begun.elapsed();
    (seen, end)
}

/// Returns the steps to the state at `place` of the last layer, and one more.
fn path<M: Model>(model: &M, origins: &[Vec<(u32, u8)>], place: usize, last: Option<u8>) -> Vec<String> {
    let mut steps: Vec<u8> = last.into_iter().collect();
    let mut place = place;
    for layer in origins.iter().skip(1).rev() {
        let Some(&(from, step)) = layer.get(place) else { break };
        steps.push(step);
        place = from as usize;
    }
    steps.iter().rev().map(|step| model.describe(*step)).collect()
}
