"""Operations of torch that were searched for rows whose bits depend on other rows, on a CPU.

`tests/compute/rows.py` searches. A model with any other takes one example at a time.
"""

from __future__ import annotations

from functools import lru_cache

UNEVEN = "uneven product"
"""What a product of rows is called that may be added up in several orders."""

ACROSS = " across records"
"""What the name of an operation ends in that adds up numbers of records that lie side by side, all together."""

PRODUCTS_AND_ROWS = """
    addmm mm bmm baddbmm convolution convolution_backward embedding embedding_dense_backward
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data logsumexp
    nll_loss_forward nll_loss_backward max_pool2d_with_indices max_pool2d_with_indices_backward
    avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward mean sum
"""
NUMBER_BY_NUMBER = """
    relu relu_ threshold threshold_backward leaky_relu leaky_relu_ leaky_relu_backward hardtanh hardtanh_
    hardtanh_backward tanh tanh_backward exp sqrt add add_ sub sub_ rsub mul mul_ div div_ neg
    abs sgn maximum minimum clamp clamp_min where masked_fill eq ne ge gt le lt
"""
MOVED_ABOUT = """
    view _unsafe_view _reshape_alias reshape t transpose permute expand squeeze unsqueeze select slice alias
    detach clone copy_ cat stack split split_with_sizes unbind index_select gather select_backward slice_backward
    constant_pad_nd as_strided _to_copy empty empty_like new_empty new_empty_strided empty_strided zeros
    zeros_like new_zeros ones ones_like new_ones full full_like new_full arange scalar_tensor zero_ fill_
"""
ALIKE = frozenset(" ".join((PRODUCTS_AND_ROWS, NUMBER_BY_NUMBER, MOVED_ABOUT)).split())
"""Operations whose results were found to be the same in a register and out of it, in any row."""

FUNCTIONS = """
    sigmoid sigmoid_ sigmoid_backward tanh_ softplus softplus_backward log_sigmoid_forward log_sigmoid_backward
    elu elu_ elu_backward celu celu_ gelu gelu_backward silu silu_ silu_backward mish mish_ mish_backward
    hardswish hardswish_ hardswish_backward hardsigmoid hardsigmoid_backward glu glu_backward
    _prelu_kernel _prelu_kernel_backward softshrink softshrink_backward hardshrink hardshrink_backward
    exp_ expm1 log log1p log2 rsqrt sqrt_ reciprocal pow pow_ sin cos tan atan atan2 asinh sinh cosh hypot
    erf erfinv lgamma digamma polygamma i0 special_i1 sinc xlogy logaddexp lerp addcmul addcdiv fmod remainder
    sign floor ceil round trunc clamp_ clamp_max clamp_min_ neg_ masked_fill_
    logical_and logical_and_ logical_or logical_not
    bitwise_and bitwise_and_ bitwise_or bitwise_not isnan isinf isfinite mse_loss mse_loss_backward
    huber_loss huber_loss_backward smooth_l1_loss smooth_l1_loss_backward
    binary_cross_entropy binary_cross_entropy_backward
"""
BY_RECORD = """
    std var var_mean linalg_vector_norm prod cumsum cumprod logcumsumexp amax amin max min argmax argmin sort topk
    native_batch_norm native_batch_norm_backward mv nll_loss2d_forward nll_loss2d_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    max_pool3d_with_indices max_pool3d_with_indices_backward avg_pool3d avg_pool3d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward
    upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward
    upsample_bicubic2d upsample_bicubic2d_backward grid_sampler_2d grid_sampler_2d_backward median
    _fft_c2c _fft_r2c _fft_c2r _safe_softmax
    native_dropout native_dropout_backward bernoulli bernoulli_
"""
MOVED_OTHERWISE = """
    _unsafe_index flip roll repeat scatter scatter_ scatter_add scatter_add_ index index_put index_put_
    _unsafe_index_put _index_put_impl_ index_add index_add_ index_copy masked_select tril triu diagonal
    diagonal_backward diag_embed unfold unfold_backward im2col col2im pixel_shuffle pixel_unshuffle
    reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
    replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward
    squeeze_ unsqueeze_ transpose_ t_ view_as_complex view_as_real unsafe_split unsafe_chunk
    _conj _conj_physical conj_physical resolve_conj resolve_neg lift_fresh lift_fresh_copy
    rand_like randn_like
"""
SEARCHED = ALIKE | {UNEVEN} | frozenset(" ".join((FUNCTIONS, BY_RECORD, MOVED_OTHERWISE)).split())
"""Those, and operations of which it was found in batches of a multiple of 32 rows, by one thread. Of others nobody
knows: what multiplies matrices inside one operation (`cdist`, `bilinear`, fused encoders) was found to add up each
row by where it stands, and what reads a number may take another way because of it."""


@lru_cache(maxsize=64)
def unsearched(operations: frozenset[str]) -> str:
    """The first of which nobody knows whether one record's numbers depend on another's; empty if there is none."""
    return min((name for name in operations if name.removesuffix(ACROSS) not in SEARCHED), default="")
