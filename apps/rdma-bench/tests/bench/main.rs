mod measure;
mod program;
