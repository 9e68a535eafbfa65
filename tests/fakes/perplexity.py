"""What llama.cpp's perplexity tool says."""

SAID = """
0.02.678.513 I kl_divergence: computing over 8 chunks, n_ctx=256, batch_size=2048, n_seq=8

chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence            Same top p
   1      27.7744 ±    6.9214       0.14021 ±    0.07233       0.35696 ±    0.02848    70.079 ±  4.079 %

====== Perplexity statistics ======
Mean PPL(Q)                   :  55.233915 ±   5.377686
Mean PPL(base)                :  40.975543 ±   4.193557
Cor(ln(PPL(Q)), ln(PPL(base))):  95.20%
Mean ln(PPL(Q)/PPL(base))     :   0.298602 ±   0.031335
Mean PPL(Q)/PPL(base)         :   1.347973 ±   0.042239
Mean PPL(Q)-PPL(base)         :  14.258372 ±   1.888975

====== KL divergence statistics ======
Mean    KLD:   0.450413 ±   0.010607
Maximum KLD:   3.470160
99.9%   KLD:   2.779868
99.0%   KLD:   1.586614
Median  KLD:   0.409351
Minimum KLD:   0.000778

====== Token probability statistics ======
Mean    Δp: -6.154 ± 0.435 %
RMS Δp    : 15.171 ± 0.781 %
Same top p: 62.008 ± 1.523 %
"""
"""What llama-perplexity (build 11434) said of SmolLM2 in Q2_K against its Q4_1, shortened."""
