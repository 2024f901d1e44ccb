//! Test vectors for control messages and for connections, from `spec/vectors`. They are checked
//! against any implementation that speaks the [`protocol`], ours included.

pub mod check;
pub mod data;
mod invariants;
pub mod lint;
mod moved;
pub mod ours;
pub mod protocol;
pub mod shim;
mod trace;

use std::path::{Path, PathBuf};

use data::{ControlFile, TraceFile};
use valkey_rdma_vectors::{CONTROL, TRACES};

/// All vector files of a folder.
pub struct Files {
    /// `control/*.json`, by name without extension.
    pub control: Vec<(String, ControlFile)>,
    /// `trace/*.json`, by name without extension.
    pub traces: Vec<(String, TraceFile)>,
}

impl Files {
    /// Returns the vectors that this program was built with.
    ///
    /// # Errors
    /// A file is broken, which a test excludes.
    pub fn built_in() -> Result<Self, String> {
        Ok(Self { control: parse_all(CONTROL)?, traces: parse_all(TRACES)? })
    }

    /// Reads them from a folder.
    ///
    /// # Errors
    /// A file cannot be read, is not of its format, or has unknown fields.
    pub fn read(folder: &Path) -> Result<Self, String> {
        Ok(Self { control: read_all(&folder.join("control"))?, traces: read_all(&folder.join("trace"))? })
    }

    /// Draws other addresses and keys for the windows of each trace, from `seed`: the first window
    /// of each side then crosses an edge of the numbers that hold addresses. A seed of 0 changes
    /// nothing.
    pub fn move_windows(&mut self, seed: u64) {
        let traces = self.traces.iter_mut().flat_map(|(_, file)| &mut file.traces);
        traces.filter(|_| seed > 0).for_each(|trace| moved::moved(trace, seed));
    }

    /// Returns the requirements of each vector, by the vector's id.
    pub fn requirements(&self) -> impl Iterator<Item = (String, &[String])> {
        let control = self.control.iter().flat_map(|(_, file)| &file.vectors);
        let traces = self.traces.iter().flat_map(|(_, file)| &file.traces);
        let control = control.map(|vector| (vector.id.clone(), vector.requirements.as_slice()));
        control.chain(traces.map(|trace| (trace.id.clone(), trace.requirements.as_slice())))
    }
}

/// The result of a vector that did not fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The implementation did what the vector requires. Lists violations of a *should*.
    Passed(Vec<String>),
    /// The implementation lacks an optional part that the vector needs; its reason.
    Skipped(String),
}

fn parse_all<T: serde::de::DeserializeOwned>(files: &[(&str, &str)]) -> Result<Vec<(String, T)>, String> {
    let parse = |(name, text): &(&str, &str)| {
        let parsed = serde_json::from_str(text).map_err(|error| format!("{name}.json: {error}"))?;
        Ok(((*name).to_string(), parsed))
    };
    files.iter().map(parse).collect()
}

fn read_all<T: serde::de::DeserializeOwned>(folder: &Path) -> Result<Vec<(String, T)>, String> {
    let listed = std::fs::read_dir(folder).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let mut files: Vec<PathBuf> = listed
        .map_err(|error| format!("{}: {error}", folder.display()))?
        .into_iter()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .collect();
    files.sort();
    files.into_iter().map(|file| read(&file)).collect()
}

fn read<T: serde::de::DeserializeOwned>(file: &Path) -> Result<(String, T), String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let parsed = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))?;
    let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok((name, parsed))
}
