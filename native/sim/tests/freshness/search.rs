//! Breadth-first search of every state that a model can reach, and the shortest way to a bad one.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

/// One step: what happened, and the state after it or what was violated.
pub struct Step<S> {
    pub what: String,
    pub outcome: Result<S, String>,
}

/// What a search found.
#[derive(Debug)]
pub enum Found {
    /// Nothing bad, in so many states.
    Nothing { states: usize },
    /// The shortest run that ends in a violation: each step, the violation last.
    Violation { trace: Vec<String>, states: usize },
}

fn fingerprint(state: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    hasher.finish()
}

/// Visits every state. Two states are taken for one if 64 bits of hash agree: at 10^7 states that
/// happens once in 10^5 searches.
///
/// # Panics
/// If there are more than `states_max`: then the search would not be exhaustive.
pub fn search<S: Hash + Clone>(
    initial: S,
    states_max: usize,
    steps: impl Fn(&S) -> Vec<Step<S>>,
) -> Found {
    let mut seen = HashSet::from([fingerprint(&initial)]);
    // Where a state came from: index of the one before, number of the step taken there.
    let mut origins: Vec<(usize, usize)> = vec![(0, 0)];
    let mut layer = vec![(0, initial.clone())];
    while !layer.is_empty() {
        let mut next = Vec::new();
        for (index, state) in layer {
            for (number, step) in steps(&state).into_iter().enumerate() {
                match step.outcome {
                    Err(violation) => {
                        let mut trace = replay(&initial, &origins, index, &steps);
                        trace.extend([step.what, violation]);
                        return Found::Violation { trace, states: origins.len() };
                    }
                    Ok(state) if seen.insert(fingerprint(&state)) => {
                        assert!(origins.len() < states_max, "more than {states_max} states");
                        next.push((origins.len(), state));
                        origins.push((index, number));
                    }
                    Ok(_) => {}
                }
            }
        }
        layer = next;
    }
    Found::Nothing { states: origins.len() }
}

fn replay<S: Clone>(
    initial: &S,
    origins: &[(usize, usize)],
    mut index: usize,
    steps: impl Fn(&S) -> Vec<Step<S>>,
) -> Vec<String> {
    let mut numbers = Vec::new();
    while index != 0 {
        let (before, number) = origins[index];
        numbers.push(number);
        index = before;
    }
    let mut state = initial.clone();
    let mut trace = Vec::new();
    for number in numbers.into_iter().rev() {
        let step = steps(&state).swap_remove(number);
        trace.push(step.what);
        state = step.outcome.unwrap_or_else(|_| unreachable!("a step that was taken before"));
    }
    trace
}
