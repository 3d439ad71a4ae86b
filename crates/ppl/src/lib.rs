//! ppl
