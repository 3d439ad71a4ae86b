//! Rectangles of matrices. The library's own macro for them holds `unsafe`, which this crate forbids.

use std::ops::Range;

use ndarray::{Array2, ArrayBase, ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis, Data, DataMut, Ix1, Ix2};

/// The rectangle `rows` x `columns`.
pub fn part<A>(
    m: &ArrayBase<impl Data<Elem = A>, Ix2>,
    rows: Range<usize>,
    columns: Range<usize>,
) -> ArrayView2<'_, A> {
    let mut view = m.view();
    view.slice_axis_inplace(Axis(0), rows.into());
    view.slice_axis_inplace(Axis(1), columns.into());
    view
}

/// [`part`] to write to.
pub fn part_mut<A>(
    m: &mut ArrayBase<impl DataMut<Elem = A>, Ix2>,
    rows: Range<usize>,
    columns: Range<usize>,
) -> ArrayViewMut2<'_, A> {
    let mut view = m.view_mut();
    view.slice_axis_inplace(Axis(0), rows.into());
    view.slice_axis_inplace(Axis(1), columns.into());
    view
}

/// Entries `columns` of row `row`.
pub fn row_part<A>(m: &Array2<A>, row: usize, columns: Range<usize>) -> ArrayView1<'_, A> {
    let mut view = m.row(row);
    view.slice_axis_inplace(Axis(0), columns.into());
    view
}

/// [`tail`] to write to.
pub fn tail_mut<A>(v: &mut ArrayBase<impl DataMut<Elem = A>, Ix1>, begin: usize) -> ArrayViewMut1<'_, A> {
    let mut view = v.view_mut();
    view.slice_axis_inplace(Axis(0), (begin..).into());
    view
}

/// Entries from `begin` on.
pub fn tail<A>(v: &ArrayBase<impl Data<Elem = A>, Ix1>, begin: usize) -> ArrayView1<'_, A> {
    let mut view = v.view();
    view.slice_axis_inplace(Axis(0), (begin..).into());
    view
}
